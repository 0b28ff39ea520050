"""Programs that start at once: a server imports the libraries, and forks for each program.

Imports were a third of the suite's work. A program runs as under `python PROGRAM ...`, with a directory,
environment, files, signals and exit status of its own; only the libraries' modules are there already. A test
of imports, or of what a library prints as it is loaded, starts Python itself.

    forked.py serve SUITE SOCKET MODULE ...    until the process of that number has ended
    forked.py run SOCKET PROGRAM ...    or, as under python, -m MODULE ... or -c CODE ...

The sys.executable of a program is a file next to the socket: what it starts by a path, or by torchrun, starts
at once too. All else, such as the processes of rewards, is started by Python itself.
"""

import json
import os
import shutil
import signal
import socket
import sys

EXECUTABLE = """#!/bin/sh
[ "$1" = -u ] && shift
case $1 in *.py) forked=1 ;; -m) [ "$2" = torch.distributed.run ] && forked=1 ;; esac
[ $forked ] && exec {python} -I -S {forked} run {socket} "$@"
exec {python} "$@"
"""


def serve(suite, path, *modules):
    """Import the modules and fork for each client; returns in the processes of the programs alone."""
    import gc
    import importlib

    try:
        for name in modules:
            importlib.import_module(name)
    except BaseException:
        shutil.rmtree(os.path.dirname(path))
        raise
    gc.freeze()  # else a collection in each child would copy all pages
    gc.unfreeze = gc.freeze  # vLLM would search all of it at the end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors end by themselves
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{path}.new")
    server.listen(64)
    executable = os.path.join(os.path.dirname(path), "python")
    with open(executable, "w") as file:
        file.write(EXECUTABLE.format(python=sys.executable, forked=os.path.abspath(__file__), socket=path))
    os.chmod(executable, 0o755)
    sys.executable = executable
    os.rename(f"{path}.new", path)
    server.settimeout(1)
    while os.path.exists(f"/proc/{suite}"):
        try:
            client, _ = server.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            client.settimeout(None)
            return supervise(client)
        client.close()
    shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    os._exit(0)


def supervise(client):
    """Fork the program of a client, pass on its signals, tell its end; kill it if the client has gone."""
    import threading

    length = int.from_bytes(client.recv(8, socket.MSG_WAITALL), "big")
    request = json.loads(client.recv(length, socket.MSG_WAITALL))
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    program = os.fork()
    if program == 0:
        client.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.argv, os.getppid = request["argv"], lambda: request["parent"]
        return
    for file in [0, 1, 2, *files]:
        os.close(file)

    def listen():
        while number := client.recv(1):
            os.kill(program, number[0])
        os.kill(program, signal.SIGKILL)

    threading.Thread(target=listen, daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    client.sendall(status.to_bytes(4, "big", signed=True))
    os._exit(0)


def run(path, *argv):
    """Have the server run a program, and end as it does."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    request = dict(argv=argv, env=dict(os.environ), cwd=os.getcwd(), parent=os.getppid())
    request = json.dumps(request).encode()
    server.sendall(len(request).to_bytes(8, "big") + request)
    socket.send_fds(server, [b"f"], [0, 1, 2])
    status = int.from_bytes(server.recv(4, socket.MSG_WAITALL) or b"\1", "big", signed=True)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def main():
    """Run the program that sys.argv names -> its exit status."""
    import runpy

    try:
        if sys.argv[0] == "-m":
            sys.argv.pop(0)
            sys.modules.pop(sys.argv[0], None)  # else runpy warns of it
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif sys.argv[0] == "-c":
            exec(sys.argv.pop(1), dict(__name__="__main__"))
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    dict(serve=serve, run=run)[sys.argv[1]](*sys.argv[2:])
    status = main()  # in a program's process
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)  # without taking all modules apart, half a second
