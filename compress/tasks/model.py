"""lm-eval's model class `specpress`: any model that `runtime.load` takes, through its own kernels and its own cache.

Importing this module registers it, as lm-eval's own classes do. Truncation and the splitting of long texts are those of
lm-eval's class `hf`, so that both give the same figures for the same model.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from calib.windows import start_token
from compress.errors import UserError
from compress.logits import log_probabilities, token_nll
from runtime import load
from runtime.contract import CacheKind, Rows, integers
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions, Speculator

if TYPE_CHECKING:
    from runtime.model.load import Model

# What a task may say of generation, with our names; `until` and the number of tokens come on top.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_NEW_TOKENS = 256
_SCORED = tuple[float, bool]


@register_model("specpress")
class SpecpressLM(TemplateLM):
    """pretrained  a model: directory, run folder, GGUF file or hub name; or one that is loaded.

    cache       float32, float16, int8, int4 or int3; None: as the artifact says.
    batch_size  requests in one forward. max_length: positions of a request; None: all that the model has.

    Raises UserError for a model that cannot be loaded, and a cache that the decoder does not have.
    """

    def __init__(
        self,
        pretrained: "str | Model",
        cache: CacheKind | None = None,
        batch_size: int | str = 8,
        max_length: int | None = None,
        device: str | None = None,
        threads: int | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        try:
            self.batch_size = int(batch_size)
        except ValueError as error:
            raise UserError(f"batch_size: expected a number of requests, found {batch_size!r}: name one") from error
        if isinstance(pretrained, str):
            if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
                # lm-eval's command asks for cuda:0 where nobody said anything, and its own classes do the same.
                logging.getLogger(__name__).warning("torch finds no CUDA device for %s: running on the CPU", device)
                device = "cpu"
            self.model = load(pretrained, device=device or "cpu", threads=threads)
        else:
            self.model = pretrained
        options = CacheOptions(cache or "auto")
        self._decoder, self._cache = self.model.decoder, options.make(self.model.decoder)
        self._plain = Speculator(self.model, cache=options, max_batch=min(self.batch_size, max_batch_size or 256))
        self.tokenizer: Any = self.model.tokenizer
        self.max_length = min(max_length or self._decoder.max_positions, self._decoder.max_positions)

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before the first token of a text that has no other beginning."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text; a beginning token that it has already is not put there again."""
        begins = start_token(self.tokenizer) is not None and string.startswith(self.tokenizer.bos_token)
        special = not begins if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(string, add_special_tokens=special, verbose=False)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the model's template writes it."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[_SCORED]:
        """(log-likelihood of the continuation, whether every token of it is the most probable) of each request."""
        found: list[_SCORED] = [(0.0, False)] * len(requests)
        # Of about equal length together; the answers in the order of the requests.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        for first in range(0, len(order), self.batch_size):
            places = order[first : first + self.batch_size]
            scored = self._scored([(requests[i][1], requests[i][2]) for i in places])
            for place, score in zip(places, scored, strict=True):
                found[place] = score
                if requests[place][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[place][0], score)
        return found

    def _scored(self, requests: Sequence[tuple[list[int], list[int]]]) -> Iterator[_SCORED]:
        """One forward for all of them, and what it says of each continuation."""
        tokens: list[int] = []
        spans: list[tuple[int, int, int]] = []
        wanted: list[int] = []
        for context, continuation in requests:
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens: the model has {self.max_length} positions"
                )
            read = [*context, *continuation][-(self.max_length + 1) :][:-1]
            spans.append((self._cache.open(len(read)), 0, len(read)))
            tokens += read
            wanted += range(len(tokens) - len(continuation), len(tokens))
        with torch.inference_mode():
            logits = self._decoder.forward(integers(tokens), Rows.chains(spans), self._cache, integers(wanted)).logits
        for request, _, _ in spans:
            self._cache.close(request)
        if not bool(torch.isfinite(logits).all()):
            raise UserError("a task: expected finite logits, found others: the weights or a kernel are broken")
        for rows, (_, continuation) in zip(logits.split([len(one) for _, one in requests]), requests, strict=True):
            targets = integers(continuation).to(rows.device)
            yield -float(token_nll(log_probabilities(rows), targets).sum()), bool((rows.argmax(-1) == targets).all())

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows of all positions that do not overlap."""
        found = []
        for text, *_ in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            scored = self._loglikelihood_tokens([(None, *make_disjoint_window(window)) for window in windows])
            found.append(sum(score for score, _ in scored))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes up to the first stop text of each request. Raises UserError for unknown settings."""
        found = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(place)
        for places in groups.values():
            settings = dict(normalize_gen_kwargs(requests[places[0]].args[1], _NEW_TOKENS))
            until, most = [stop for stop in settings.pop("until") if stop], settings.pop("max_gen_toks")
            settings.pop("do_sample", None)
            if unknown := sorted(set(settings) - set(_SAMPLING)):
                raise UserError(f"generation_kwargs: expected {', '.join(_SAMPLING)}, found {', '.join(unknown)}")
            room = self.max_length - most
            if room < 1:
                raise UserError(f"max_gen_toks: {most} tokens leave no room in the model's {self.max_length} positions")
            prompts = [self.tok_encode(requests[place].args[0])[-room:] for place in places]
            written = self._plain.generate(prompts, most, Sampling(**settings), [self.eot_token_id, *until])
            for place, one in zip(places, written, strict=True):
                found[place] = one.text
                self.cache_hook.add_partial("generate_until", requests[place].args, one.text)
        return found
