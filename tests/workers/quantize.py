"""Runs quantize.py for each dict of flags in a JSON list, all in one process -> what each said, as JSON."""

import contextlib
import io
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(sys.prefix, "quantize")))
from algos import quantize

for flags in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            quantize.main(quantize.Args(**flags))
        except SystemExit as error:
            print(error)
    print("said", json.dumps(said.getvalue().strip()), flush=True)
