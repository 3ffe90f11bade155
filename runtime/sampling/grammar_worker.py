"""Tries a grammar in a process of its own, which may be killed: grammar.py starts it, as a script.

A grammar somebody sends may take its compiler minutes, all memory or a stack overflow. Messages are JSON: first
{"tokenizer", "vocab", "ends"}, then for each grammar {"grammar"}; the answer is {"error"}, empty where it is good.
"""

import json
import resource
import sys
import threading
import time
from multiprocessing.connection import Connection

# Steps of a text that are tried, and the most that one may take: a round waits for it.
STEPS = 12
MASK_SECONDS = 0.08
# Less than any thread of the process that will use the grammar has.
STACK = 4 * 2**20
MEMORY = 4 * 2**30


def tried(tokenizer: object, grammar: str, ends: frozenset[int]) -> str:
    """What is wrong with the grammar; empty where a text could be begun in it, at bearable cost."""
    from llguidance import LLMatcher

    from_limits = limits()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=from_limits)  # type: ignore[arg-type]
    for step in range(STEPS):
        if matcher.is_error():
            return str(matcher.get_error())
        if matcher.is_stopped():
            break
        began = time.thread_time()
        mask = matcher.compute_bitmask()
        if time.thread_time() - began > MASK_SECONDS:
            return f"TOO SLOW: a token of it takes more than {1000 * MASK_SECONDS:.0f} ms"
        allowed = [8 * i + bit for i, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]
        allowed = [token for token in allowed if token not in ends]
        if not allowed:
            break
        # Now the first, now the last one: it is to come to several parts of the grammar.
        matcher.consume_token(allowed[-1 if step % 2 else 0])
    return str(matcher.get_error()) if matcher.is_error() else ""


def limits() -> object:
    """Limits of a grammar's work, here and where it is used."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_grammar_size=200_000, max_lexer_states=50_000, verbose_errors=False)


def serve(connection: Connection) -> None:
    """Answers until the other side is gone."""
    from llguidance import LLTokenizer

    about = json.loads(connection.recv_bytes())
    ends = frozenset(about["ends"])
    tokenizer = LLTokenizer(about["tokenizer"], n_vocab=about["vocab"], eos_token=about["ends"])
    connection.send_bytes(json.dumps({"error": ""}).encode())
    while True:
        try:
            asked = json.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(json.dumps({"error": tried(tokenizer, asked["grammar"], ends)}).encode())


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    thread = threading.Thread(target=serve, args=(Connection(int(sys.argv[1])),))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
