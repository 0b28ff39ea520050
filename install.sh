#!/bin/sh
# Makes or completes the CPU environment .venv: sh install.sh [requirements-extra.txt ...]
# PYTHON=python3.12 sh install.sh takes that Python. What pip prints goes to .venv/install.log.
set -eu
cd "$(dirname "$0")"
log=.venv/install.log
pythons=${PYTHON:-python3.11 python3.12 python3.13 python3}
torch=$(grep '^torch==' requirements-cpu.txt)
cpu_index=https://download.pytorch.org/whl/cpu

fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }
pip_failed() { tail -n 15 "$log" >&2 && fail "pip cannot install $1; its log is $log"; }
pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input "$@" >>"$log" 2>&1; }

# whether $1 is Python 3.11 to 3.13 and can make virtual environments
suits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1
}

# whether .venv has the package $1
has() { .venv/bin/python -c "from importlib.metadata import version; version('$1')" 2>/dev/null; }

torch_imports() {
    .venv/bin/python -c "import torch; assert torch.__version__.split('+')[0] == '${torch#*==}'" >>"$log" 2>&1
}

# whether C extensions can be built, which takes a compiler and Python.h
compiles() {
    cc=${CC:-$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_config_var("CC"))')}
    include=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
    echo '#include <Python.h>' | $cc -I"$include" -fsyntax-only -x c - >>"$log" 2>&1
}

if [ ! -e .venv/bin/python ]; then
    for python in $pythons; do suits "$python" && break || python=; done
    [ "$python" ] || fail "no Python 3.11 to 3.13 with venv among $pythons: install one" \
        "(Debian: python3.11 and python3.11-venv) or set PYTHON"
    echo "making .venv with $("$python" --version); pip's log is $log"
    "$python" -m venv --clear .venv || fail "$python -m venv --clear .venv failed"
fi
suits .venv/bin/python || fail "the Python of .venv is not 3.11 to 3.13: delete .venv"
: >"$log"
pip --version || .venv/bin/python -m ensurepip >>"$log" 2>&1 || fail ".venv has no pip: see $log"

for file in requirements-cpu.txt "$@"; do
    mark=.venv/installed${file#requirements} list=$file
    mark=${mark%.txt}
    mark=${mark%-cpu}
    [ "$mark" -nt "$file" ] && continue
    if [ "$file" = requirements-cpu.txt ]; then
        ! has vllm || fail ".venv is for GPUs: install requirements.txt by hand and touch .venv/installed"
        if ! torch_imports; then # by itself pip takes the CUDA build, without its 3 GB of libraries
            echo "installing $torch"
            pip install --no-deps "$(grep '^typing_extensions==' requirements-cpu.txt)" || pip_failed typing_extensions
            pip install --force-reinstall --no-deps --retries 0 --timeout 15 --index-url $cpu_index "$torch" ||
                pip install --force-reinstall --no-deps "$torch" || pip_failed "$torch"
            torch_imports || fail "$torch does not import ($(tail -n 1 "$log")): let pip reach its CPU build at" \
                "$cpu_index, or say where it is by PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, or" \
                "add the libraries of the CUDA build: .venv/bin/python -m pip install $torch"
        fi
    elif grep -q '^pycosat==' "$file" && ! has pycosat && ! compiles; then
        echo "leaving out pycosat (no C compiler or no Python.h): reasoning-gym's zebra_puzzles needs it"
        list=.venv/without-pycosat.txt mark=.venv/without-pycosat.txt # the next call looks for a compiler again
        grep -v '^pycosat==' "$file" >$list
        # reasoning-gym imports it at its start, and calls it for zebra_puzzles only
        printf 'def itersolve(clauses):\n    raise ImportError("pycosat is not installed, it needs a C compiler")\n' \
            >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pycosat.py"
    fi
    echo "installing $file"
    place=
    if [ "$file" = requirements-quantize.txt ]; then # its versions are not those of .venv
        rm -rf .venv/quantize
        place="--target .venv/quantize"
    fi
    pip install --no-deps $place -r "$list" || pip_failed "$file"
    touch "$mark"
done
