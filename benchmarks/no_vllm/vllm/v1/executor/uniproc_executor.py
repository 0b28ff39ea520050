"""The trainers name its shared memory."""


class ExecutorWithExternalLauncher:
    _distributed_args = None
