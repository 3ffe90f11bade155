"""A task small enough to train in a moment, and a program that trains it: for kills and for several processes.

python training_driver.py FOLDER JOB: one import serves many forks. JOB is JSON: steps; points [n …]: kills just before
a run's n-th step of making files last (compress.artifact.files), each gone on with; processes: how many train together;
as_it_is: this process trains, as torchrun has started it. What was found goes to FOLDER/found.json.
"""

import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.recipe.training import Budget, Settings
from compress.training.contract import Group, Loss
from compress.training.data import PackedBatches
from compress.training.loop import TrainingResult, train
from compress.training.parallel import current, joined

VOCABULARY = 17
SETTINGS = Settings(learning_rate=1e-2, batch=4, length=12, evaluate_every=5, save_every=7, weight_decay=0.1)


def stream(tokens: int = 4000) -> Tensor:
    """A text with something to learn: mostly each token is a function of the one before."""
    chooser = torch.Generator().manual_seed(3)
    noise = torch.rand(tokens, generator=chooser)
    out = [0]
    for place in range(1, tokens):
        out.append((out[-1] * 5 + 2) % VOCABULARY if noise[place] < 0.8 else int(noise[place] * 1000) % VOCABULARY)
    return torch.tensor(out)


class Toy:
    """A bigram model with dropout, so that the random numbers of a step matter; `broken_at` makes a loss infinite."""

    def __init__(self, broken_at: float = 2.0, muon: bool = False):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, 24), nn.Dropout(0.1), nn.Linear(24, VOCABULARY))
        self.broken_at, self.muon = broken_at, muon
        self.held_out = stream()[-200:]

    def groups(self) -> list[Group]:
        if self.muon:
            linear = self.model[2]
            rest = [self.model[0].weight, linear.bias]
            return [Group("linear", [linear.weight], optimizer="muon"), Group("rest", rest, rate_factor=0.5)]
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() >= 2]
        biases = [parameter for parameter in self.model.parameters() if parameter.dim() < 2]
        return [Group("matrices", matrices), Group("biases", biases, weight_decay=0.0)]

    def loss(self, batch: Tensor, progress: float) -> Loss:
        self.model.train()
        value = self._entropy(batch)
        if progress >= self.broken_at:
            value = value * float("inf")
        return Loss(value, {"entropy": float(value.detach())})

    def evaluate(self) -> float:
        self.model.eval()
        return float(self._entropy(self.held_out[None]).detach())

    def state(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(state)

    def _entropy(self, batch: Tensor) -> Tensor:
        logits = self.model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def silent(stage: str, done: int, total: int) -> None:
    """No progress."""


def run(
    task: Toy, folder: Path, budget: Budget, settings: Settings = SETTINGS, notes: list[str] | None = None
) -> TrainingResult:
    """Trains the toy on its stream."""
    said = [] if notes is None else notes
    return train(task, batches(settings), budget, settings, folder, silent, said.append)


def batches(settings: Settings = SETTINGS) -> PackedBatches:
    """Windows of the stream."""
    return PackedBatches(stream(), settings, current())


def main(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """An uninterrupted run; runs that are killed and go on; runs of several processes."""
    found: dict[str, Any] = {"straight": None, "kills": []}
    assert finish(fork(folder, "straight", job)) == 0
    found["straight"] = outcome(folder, "straight")
    for point in job.get("points", ()):
        status = finish(fork(folder, f"kill-{point}", {**job, "kill_at": point}))
        assert finish(fork(folder, f"kill-{point}", job)) == 0
        found["kills"].append({"status": status, "outcome": outcome(folder, f"kill-{point}")})
    if size := job.get("processes"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        peers = [fork(folder, "several", job, rank, size, port) for rank in range(size)]
        assert [finish(peer) for peer in peers] == [0] * size
        found |= {"first": outcome(folder, "several"), "second": outcome(folder, "several", rank=1)}
    return found


def fork(folder: Path, name: str, job: dict[str, Any], rank: int = 0, size: int = 1, port: int = 0) -> int:
    """A child that trains; `size` above 1: as torchrun would start it."""
    child = os.fork()
    if child:
        return child
    try:
        if size > 1:
            os.environ |= {"TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        one(folder, name, job)
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def finish(child: int) -> int:
    """Exit status of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    """What a child has written."""
    found: dict[str, Any] = json.loads((folder / f"{name}-{rank}.json").read_text())
    return found


def one(folder: Path, name: str, job: dict[str, Any]) -> None:
    """One training run, perhaps one of several processes; its result goes to a file."""
    if job.get("kill_at"):
        kill_at(job["kill_at"])
    task = Toy()
    # Dropout differs between the rows of one process and those of two, so it is off where they are compared.
    if job.get("no_dropout"):
        task.model[1] = nn.Identity()
    with joined() as world:
        budget = Budget(tokens=job["steps"] * SETTINGS.tokens_per_step)
        trained = run(task, folder / name, budget).to_dict()
        trained.pop("seconds")
        weights = {key: tensor.flatten().tolist() for key, tensor in task.state().items()}
        result = {"rank": world.rank, "trained": trained, "weights": weights}
        (folder / f"{name}-{world.rank}.json").write_text(json.dumps(result))


def kill_at(number: int) -> None:
    """Ends the process just before its step of that number."""
    from compress.artifact import files

    count = 0
    for name in ("sync", "rename", "remove", "sync_folder"):
        original = getattr(files, name)

        def step(*given: Any, original: Any = original) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given)

        setattr(files, name, step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Optimisers import it when they are made, which takes longer than a whole run: here once for all forks.
    importlib.import_module("torch._dynamo")
    place, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
    if wanted.get("as_it_is"):
        one(place, "result", wanted)
    else:
        (place / "found.json").write_text(json.dumps(main(place, wanted)))
