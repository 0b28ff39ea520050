"""A Python interpreter as a tool: python(code) runs a program in the sandbox of rewards/sandbox/__init__.py.

The model calls it in its own format of calls and reads what the program printed, and the last line of an
error.  Each call is a new program; it has the standard library, no files and no network.  One that
the machine does not run ends the trajectory with a failure.
"""

from rewards.sandbox import run_python, tier

TIMEOUT_S = 5  # of a processor
tier()  # a machine without a sandbox is refused here, before a model is loaded


def python(code: str) -> str:
    """Runs a Python program and returns what it prints. Nothing is kept between calls.

    Args:
        code: the program, which prints its results
    """
    result = run_python(code, timeout_s=TIMEOUT_S)
    error = result.stderr.strip().rpartition("\n")[2]
    if result.reason:
        error = {"timeout": f"no end after {TIMEOUT_S} s", "output": "too much output"}[result.reason]
    if result.returncode or result.reason:
        return f"{result.stdout}error: {error or f'exit code {result.returncode}'}"
    return result.stdout or "the program printed nothing"


TOOLS = [python]
