"""The trainers import this; a Hugging Face model has no layers that they would call it for."""

dispatch_cpu_unquantized_gemm = None
