"""A conversation of sampler and environments."""

import time
from dataclasses import dataclass

from data_prep.lib.images import request
from envs.calls import observation
from envs.messages import Unrenderable, shorten
from system.sampler import params_of
from system.thoughts import with_opening

ENV_WORKERS = 8  # environments of a rank that work at the same time


@dataclass
class Limits:
    """Of a conversation: tokens after the prompt, turns of the model, tokens of an environment's message."""

    response: int
    turns: int
    observation: int


def converse(engine, rows, pool, tokenizer, limits, **sampling):
    """Let the sampler and each row's environment (pool None: none) talk in turns, until all have ended.

    No row waits for another: its environment works while the sampler writes for others.
    rows: dicts with prompt_ids, extra_info and `seed`, numbers that seed the sampling. This adds
    response_ids, all that follows the prompt; answer_ids, of the last turn without the token that ended it;
    finish_reason: stop, length, turns, or timeout, crash, error of the environment; and more.
    mask_t: whether the model wrote a token; rollout_logp_t: 0 where it did not.
    Returns the seconds in which the sampler had nothing to do.
    """
    from vllm.distributed import get_tp_group

    tp_group = get_tp_group()
    waiting = set()  # for their environments
    idle = 0.0
    for i, row in enumerate(rows):
        row |= dict(response_ids=[], turns=0, messages=[])
        row |= dict(rollout_logp_t=[], mask_t=[])
        row |= dict(cut_observations=0, env_reward=None, failure=None)
        ask(engine, i, row, limits, sampling)
    while engine.has_unfinished_requests() or waiting:
        finished = engine.step() if engine.has_unfinished_requests() else []
        for done in finished:
            i = int(done.request_id)
            text = add_turn(rows[i], done.outputs[0], tokenizer)
            if pool and rows[i]["finish_reason"] == "stop":
                waiting.add(i)
                if tp_group.is_first_rank:  # it asks the environments for all of its group
                    pool.step(i, text, rows[i]["extra_info"])
        if not waiting:
            continue
        begin = time.perf_counter()
        nothing_to_sample = not engine.has_unfinished_requests()
        answers = pool.answers(wait=nothing_to_sample) if tp_group.is_first_rank else []
        answers = tp_group.broadcast_object(answers)
        if nothing_to_sample:
            idle += time.perf_counter() - begin
        for answer in answers:
            i = answer["key"]
            waiting.remove(i)
            if add_answer(rows[i], answer, pool.tools, tokenizer, limits):
                ask(engine, i, rows[i], limits, sampling)
    if pool:
        pool.clear()
    return idle


def ask(engine, i, row, limits, sampling):
    """Request the next turn of row number i."""
    seed = row["seed"]  # of the first turn, as in grpo.py
    if row["turns"]:
        seed = (*seed, row["turns"])
    room = limits.response - len(row["response_ids"])
    params = params_of(seed, max_tokens=room, **sampling)
    engine.add_request(str(i), request(row, row["response_ids"]), params)


def add_turn(row, output, tokenizer):
    """Add a turn of the model to its row -> the text of the turn, as `with_opening` has it."""
    before = [*row["prompt_ids"][-20:], *row["response_ids"][-20:]]
    row["response_ids"] += output.token_ids
    row["mask_t"] += [True] * len(output.token_ids)
    if output.logprobs:
        row["rollout_logp_t"] += output.logprobs.logprobs
    ended = output.finish_reason == "stop"  # by its last token
    answer_ids = output.token_ids[: len(output.token_ids) - ended]
    row |= dict(answer_ids=answer_ids, finish_reason=output.finish_reason)
    row["turns"] += 1
    text = tokenizer.decode(answer_ids)  # with special tokens: some mark thoughts and calls
    row["messages"].append(dict(role="assistant", content=text))
    return with_opening(text, tokenizer.decode(before))


def add_answer(row, answer, tools, tokenizer, limits):
    """Add what its environment answered to a row -> whether the model has another turn."""
    if answer["failure"]:
        row |= dict(failure=answer["failure"], finish_reason=answer["failure"].partition(":")[0])
        return False
    row["env_reward"] = answer["reward"]
    if not answer["messages"]:
        return False
    try:
        messages, longer = shorten(tokenizer, answer["messages"], limits.observation)
        ids = observation(tokenizer, messages, tools, row["response_ids"][-1])
    except Unrenderable as error:
        row |= dict(failure=f"error: {error}", finish_reason="error")
        return False
    full = len(row["response_ids"]) + len(ids) >= limits.response  # no room for a token
    if full or row["turns"] == limits.turns:
        row["finish_reason"] = "turns" if row["turns"] == limits.turns else "length"
        return False
    row["response_ids"] += ids
    row["mask_t"] += [False] * len(ids)
    row["rollout_logp_t"] += [0.0] * len(ids)
    row["messages"] += messages
    row["cut_observations"] += longer
    return True
