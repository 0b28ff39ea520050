"""Runs a program as graders of such tasks do, and calls its functions from another process, by value.
prime_code.py sends the text of this file into a sandbox: `run` or `serve` is where the program is, `judge`
where a test is.

A request and a reply are a line of JSON each: [expression, args, kwargs] and ["value", value] or
["error", name].  What arrives is plain data, whatever a program does: no object of its own classes, no code.
"""

import builtins
import os
import sys
import types
from contextlib import suppress
from json import dumps, loads  # CAREFUL: by name, as a program may patch the module

# What a program may use without an import, as in the graders of APPS, TACO and PRIME, except numpy: solutions
# that come with these data, and starter code with its annotations, rely on it.
GIVEN = """
import collections, fractions, heapq, itertools, math, random, sys, time
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from functools import lru_cache
from heapq import *
from itertools import accumulate, combinations, permutations, product
from math import ceil, cos, exp, fabs, floor, gcd, log, log2, sin, sqrt, tan
from typing import *
"""
GIVEN_MODULES = "collections fractions functools heapq itertools json math random time typing".split()
ITERATORS = (types.GeneratorType, map, filter, zip, range, enumerate, reversed)


def encode(value):
    """Plain data as JSON that keeps types apart; of any other object only the name of its class."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": list(value)}
    if isinstance(value, ITERATORS):
        return {"iterator": [encode(item) for item in value]}
    return {"object": type(value).__name__}


def decode(data):
    """Inverse of `encode`; raises an error for what it did not make."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    [(kind, items)] = data.items()
    if kind == "object":
        return object()  # equals nothing
    if kind == "dict":
        return {decode(key): decode(item) for key, item in items}
    if kind == "complex":
        return complex(*items)
    kinds = {"tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes, "iterator": iter}
    return kinds[kind]([decode(item) for item in items])


def take_streams():
    """Files of requests or replies; all else finds an empty stdin, and its stdout is stderr."""
    files = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with open("/dev/null") as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    return files


def run(source, name="__main__"):
    """Run the program as a module of that name, with the builtins and what is GIVEN -> the module."""
    exec(GIVEN, vars(builtins))
    program = sys.modules[name] = types.ModuleType(name)
    with suppress(SystemExit):  # of sys.exit(1), which graders do not take for an error
        exec(compile(source, "program.py", "exec"), program.__dict__)
    return program


def serve(source):
    """Run the program, not as __main__, then answer requests."""
    requests, replies = take_streams()
    plain = dict(vars(builtins))  # CAREFUL: a program that defines no gcd has not solved gcd
    program = run(source, "program")
    for line in requests:
        try:
            expression, args, kwargs = loads(line)
            value = eval(expression, {**program.__dict__, "__builtins__": plain})
            if args is not None:
                value = value(*decode(args), **decode(kwargs))
            reply = dumps(["value", encode(value)])
        except Exception as error:  # of the program, whatever it is
            reply = dumps(["error", type(error).__name__])
        print(reply, file=replies, flush=True)


def judge(test, names):
    """Run test code in which `names` are functions of the program.  Ends with code 0 if it holds."""
    replies, requests = take_streams()
    calls = 0

    def proxy(name):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            print(dumps([name, encode(args), encode(kwargs)]), file=requests, flush=True)
            line = replies.readline()
            if not line:
                sys.exit("the program ended")
            kind, value = loads(line)
            if kind == "error":
                raise RuntimeError(f"the program raised {value}")
            return decode(value)

        return call

    exec(compile(test, "test.py", "exec"), {"__name__": "test"} | {name: proxy(name) for name in names})
    if not calls:
        sys.exit("the test called nothing of the program")
