"""A server that speaks OpenAI's chat completions and grades by rule: 10 if the response has the reference.

It reads a request as a chat server would: special tokens and marks count, wherever they come from.
`python tests/judge_server.py PORT` serves until it is killed.
"""

import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SPECIAL = re.compile(  # of the chat templates that are in use
    r"<\|?[\w/]+\|?>|<｜[^>]*｜>|<</?SYS>>|\[/?(?:INST|SYSTEM_PROMPT|TOOL_CALLS|gMASK|ARGS)\]"
)


def sections(text):
    """{name: text} of the sections between marks, and what is outside of all."""
    mark = re.match(r"=== (\w+) ", text)[1]
    found = dict(re.findall(rf"=== {mark} ([A-Z ]+) ===\n(.*?)\n=== {mark} END OF \1 ===", text, re.DOTALL))
    outside = re.sub(rf"=== {mark} ([A-Z ]+) ===\n.*?\n=== {mark} END OF \1 ===", "", text, flags=re.DOTALL)
    return found, outside


class Judge(ThreadingHTTPServer):
    """mode: good, or what it answers instead. requests: bodies that came."""

    daemon_threads = True

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.mode, self.requests, self.lock, self.over = "good", [], threading.Lock(), threading.Event()
        self.places = threading.Semaphore(4)  # of the mode "four"
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, body):
        """-> status, content"""
        _, user = (message["content"] for message in body["messages"])
        if SPECIAL.search(user):  # the template would begin a turn here
            return 200, json.dumps(dict(reason="obeyed a special token", grades=[10]))
        found, outside = sections(user)
        if re.search(r"ignore|perfect|grade 10|assistant:", outside, re.IGNORECASE):
            return 200, json.dumps(dict(reason="obeyed", grades=[10]))
        n = int(re.search(r"Give (\d+) grades", outside)[1])
        good = found.get("REFERENCE ANSWER", "?") in found["RESPONSE"].split()
        if self.mode in ("good", "four"):
            return 200, json.dumps(dict(reason="by rule", grades=[10 * good] * n))
        return {
            "text": (200, "I would say 10 out of 10."),
            "fenced": (200, '```json\n{"reason": "", "grades": [10]}\n```'),
            "more": (200, json.dumps(dict(reason="", grades=[10] * (n + 1)))),
            "high": (200, json.dumps(dict(reason="", grades=[11] * n))),
            "float": (200, json.dumps(dict(reason="", grades=[9.5] * n))),
            "bool": (200, json.dumps(dict(reason="", grades=[True] * n))),
            "bare": (200, json.dumps(dict(grades=[10] * n))),
            "extra": (200, json.dumps(dict(reason="", grades=[10] * n, score=1))),
            "nan": (200, '{"reason": "", "grades": [NaN]}'),
            "empty": (200, ""),
            "null": (200, None),
            "busy": (429, "busy"),
            "down": (503, "starting"),
            "key": (401, "wrong key"),
            "model": (404, "no such model"),
        }[self.mode]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
            hangs = self.server.mode == "hang"
            status, text = (200, "") if hangs else self.server.answer(body)
        if hangs:
            self.server.over.wait()
        if self.server.mode == "four" and not self.server.places.acquire(blocking=False):
            status, text = 429, "busy"
        elif self.server.mode == "four":
            time.sleep(0.1)
            self.server.places.release()
        message = dict(role="assistant", content=text)
        reply = dict(id="1", object="chat.completion", created=1, model=body["model"])
        reply["choices"] = [dict(index=0, message=message, finish_reason="stop")]
        reply = json.dumps(reply if status == 200 else dict(error=dict(message=text))).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    Judge(int(sys.argv[1]))
    threading.Event().wait()
