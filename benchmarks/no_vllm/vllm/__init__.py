"""Stands in for vLLM under `throughput.py --train_only`: random responses of the full length.

It holds a Hugging Face model with the synced weights: log-probs are true, and the check of the sync passes.
"""

from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

SamplingParams = SimpleNamespace


class LLM:
    def __init__(self, model, dtype, **_):
        self.llm_engine, self.waiting = self, []
        self.model_config = SimpleNamespace(dtype=getattr(torch, dtype), hf_config=None)
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=256))
        self.reset_encoder_cache = self.reset_prefix_cache
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.model.load_weights = self.load_weights

    def sleep(self, level):
        pass

    def wake_up(self, tags):
        pass

    def reset_prefix_cache(self):
        pass

    def apply_model(self, function):
        function(self.model)

    def load_weights(self, stream):
        state = self.model.state_dict()
        for name, weight in stream:
            state[name].copy_(weight)

    def add_request(self, request_id, prompt, params):
        self.waiting.append((request_id, prompt["prompt_token_ids"], params))

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def get_num_unfinished_requests(self):
        return len(self.waiting)

    @torch.no_grad()
    def step(self):
        return [self.answer(*self.waiting.pop())]

    def answer(self, request_id, prompt, params):
        generator = torch.Generator().manual_seed(params.seed)
        ids = torch.randint(self.model.config.vocab_size, (params.max_tokens,), generator=generator).tolist()
        hidden = self.model.base_model(torch.tensor([prompt + ids])).last_hidden_state[
            0, len(prompt) - 1 : -1
        ]
        logp = (self.model.get_output_embeddings()(hidden).float() / params.temperature).log_softmax(-1)
        values = [row[i].item() for i, row in zip(ids, logp, strict=True)]
        logprobs = SimpleNamespace(logprobs=values)
        output = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="length")
        return SimpleNamespace(request_id=request_id, prompt_token_ids=prompt, outputs=[output])
