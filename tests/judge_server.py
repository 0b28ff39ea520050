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

from conftest import golden

SPECIAL = re.compile(  # of the chat templates that are in use
    r"<\|?[\w/]+\|?>|<｜[^>]*｜>|<</?SYS>>|\[/?(?:INST|SYSTEM_PROMPT|TOOL_CALLS|gMASK|ARGS)\]"
)


def sections(text):
    """{name: text} of the sections between marks, and what is outside of all."""
    mark = re.match(r"=== (\w+) ", text)[1]
    found = dict(re.findall(rf"=== {mark} ([A-Z ]+) ===\n(.*?)\n=== {mark} END OF \1 ===", text, re.DOTALL))
    outside = re.sub(rf"=== {mark} ([A-Z ]+) ===\n.*?\n=== {mark} END OF \1 ===", "", text, flags=re.DOTALL)
    return found, outside


GRADED = dict(reason="", grades=[10])
# mode: what it writes for a response of one criterion
WRITES = {case["mode"]: case["text"] for case in golden("judge_texts")}
STATUS = dict(
    formless=400, key=401, model=404, refused=422, busy=429, later=429, long=429, broken=500, down=503
)
# mode: a body of status 200 that is no chat completion
BODIES = {case["mode"]: case["body"] for case in golden("judge_bodies")}
BODIES["deep"] = "[" * 100_000
RETRY_AFTER = dict(later="1", long="60")  # seconds


class Judge(ThreadingHTTPServer):
    """mode: good, what it answers instead, or a function of a request's body. requests: bodies that came."""

    daemon_threads, request_queue_size = True, 256

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.mode, self.requests, self.lock, self.over = "good", [], threading.Lock(), threading.Event()
        self.places = threading.Semaphore(4)  # of the mode "four"
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_):
        pass  # a client may go away

    def mode_of(self, body):
        """The mode of a request, of which a few are bad only at first or for some forms of an answer."""
        with self.lock:
            self.requests.append(body)
            mode = self.mode(body) if callable(self.mode) else self.mode
            first = self.requests.count(body) == 1
        if mode == "once":
            return "later" if first else "good"
        if mode == "plain":
            return "good" if "response_format" not in body else "formless"
        return mode

    def grade(self, body):
        """What a judge writes that goes by the reference, and does what a response tells it where it can."""
        _, user = (message["content"] for message in body["messages"])
        if SPECIAL.search(user):  # the template would begin a turn here
            return dict(reason="obeyed a special token", grades=[10])
        found, outside = sections(user)
        if re.search(r"ignore|perfect|grade 10|assistant:", outside, re.IGNORECASE):
            return dict(reason="obeyed", grades=[10])
        n = int(re.search(r"Give (\d+) grades", outside)[1])
        good = found.get("REFERENCE ANSWER", "?") in found["RESPONSE"].split()
        return dict(reason="by rule", grades=[10 * good] * n)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mode = self.server.mode_of(body)
        if mode == "hang":
            self.server.over.wait()
        if mode in ("hang", "closes"):
            return
        if mode == "four" and not self.server.places.acquire(blocking=False):
            mode = "busy"
        elif mode == "four":
            time.sleep(0.1)
            self.server.places.release()
        text = WRITES[mode] if mode in WRITES else json.dumps(self.server.grade(body))
        message = dict(role="assistant", content=text)
        reply = dict(id="1", object="chat.completion", created=1, model=body["model"])
        reply["choices"] = [dict(index=0, message=message, finish_reason="stop")]
        status = STATUS.get(mode, 200)
        if status != 200:
            reply = dict(error=dict(message=mode))
        reply = BODIES.get(mode, json.dumps(reply))
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if mode == "page" else "application/json")
        self.send_header("Content-Length", str(len(reply) + 9 * (mode == "cut")))
        if mode in RETRY_AFTER:
            self.send_header("Retry-After", RETRY_AFTER[mode])
        self.end_headers()
        self.wfile.write(reply.encode())

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    Judge(int(sys.argv[1]))
    threading.Event().wait()
