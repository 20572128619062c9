"""Trains pagoda-tiny: warm-up, a steady learning rate, then a decay. Checkpoints often and resumes by itself.

usage: python train.py --out /tmp/pagoda-tiny --minutes 90 [--init CHECKPOINT] [--compile]
The schedule follows the clock, so a busy machine trains fewer steps but still decays fully. To end early,
`touch OUT/decay`: the decay starts at once, takes its planned time, and training stops.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import model as tiny
import torch
import torch.nn.functional as F
from data import Batch, Mixture, make_tokenizer, pack_books, read_books
from tokenizers import Tokenizer
from torch import Tensor, nn

DEFAULT_CORPUS = Path(__file__).resolve().parents[3] / "shared" / "data" / "corpus"
MUON_LR, ADAM_LR = 5e-3, 3e-3
STAGES = [(0.0, 256), (0.6, 512), (0.88, 1024)]
"""(share of the time that has passed, tokens of a window): short first, since long windows cost more attention."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a factor of its peak, over seconds."""

    total_s: float
    decay_s: float
    warmup_steps: int = 60

    def factor(self, *, step: int, elapsed_s: float, decay_start_s: float) -> float:
        """Rises over the first steps, stays at 1, and falls to 0.02 from `decay_start_s` on (square-root decay)."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        left = 1.0 - min(1.0, max(0.0, elapsed_s - decay_start_s) / self.decay_s)
        return warm * max(0.02, 1.0 - math.sqrt(1.0 - left))


class Trainer:
    """Owns the model, its two optimizers and the state that a checkpoint keeps."""

    def __init__(self, net: tiny.Llama, *, compiled: bool) -> None:
        self.net = net
        self.device = next(net.parameters()).device
        self.body = torch.compile(net.model, dynamic=False) if compiled else net.model
        embedding = net.model.embed_tokens.weight
        matrices = [p for p in net.parameters() if p.dim() == 2 and p is not embedding]
        vectors = [p for p in net.parameters() if p.dim() == 1]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([embedding, *vectors], lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.step_count = 0
        self.tokens = 0
        self.elapsed_s = 0.0
        """Seconds of training in earlier runs of this checkpoint."""

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss over the learnt tokens; only their logits are computed."""
        body = self.body if torch.is_grad_enabled() else self.net.model  # no second compilation for a few windows
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden = body(batch.ids.to(self.device))
            learnt = batch.learnt.to(self.device)
            logits = self.net.head(hidden[learnt])
        return F.cross_entropy(logits.float(), batch.targets.to(self.device)[learnt])

    def step(self, batch: Batch, *, factor: float) -> float:
        for optimizer, peak in zip(self.optimizers, (MUON_LR, ADAM_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        loss = self.loss(batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step_count += 1
        self.tokens += batch.ids.numel()
        return loss.item()

    def save(self, path: Path, *, elapsed_s: float) -> None:
        state = {
            "net": self.net.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step_count": self.step_count,
            "tokens": self.tokens,
            "elapsed_s": elapsed_s,
        }
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def resume(self, path: Path) -> None:
        state: dict[str, Any] = torch.load(path, map_location=self.device)
        self.net.load_state_dict(state["net"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step_count, self.tokens, self.elapsed_s = state["step_count"], state["tokens"], state["elapsed_s"]


@torch.no_grad()
def held_out_loss(trainer: Trainer, streams: dict[str, Tensor], *, length: int, windows: int = 12) -> dict[str, float]:
    """Mean loss on held-out book text."""
    result = {}
    for name, stream in streams.items():
        starts = torch.linspace(0, len(stream) - length - 1, windows).long().tolist()
        both = torch.stack([stream[at : at + length + 1].long() for at in starts])
        everything = torch.ones_like(both[:, 1:], dtype=torch.bool)
        result[name] = trainer.loss(Batch(both[:, :-1], both[:, 1:], everything)).item()
    return result


def train(trainer: Trainer, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    books = read_books(args.corpus)
    mixture = Mixture(
        tokenizer,
        {name: pack_books(tokenizer, texts) for name, (texts, _) in books.items()},
        seed=args.seed + trainer.step_count,
        text_share=args.text_share,
    )
    held = {name: pack_books(tokenizer, texts) for name, (_, texts) in books.items()}
    schedule = Schedule(total_s=args.minutes * 60, decay_s=args.decay_minutes * 60)
    decay_start_s = schedule.total_s - schedule.decay_s
    log = (args.out / "loss.tsv").open("a", encoding="utf-8")
    start = time.monotonic() - trainer.elapsed_s
    last_save = time.monotonic()
    length, mean = 0, float("nan")
    batches: Iterator[Batch] = iter(())
    while (elapsed_s := time.monotonic() - start) < decay_start_s + schedule.decay_s:
        if (args.out / "decay").exists():
            decay_start_s = min(decay_start_s, elapsed_s)
        wanted = [size for since, size in STAGES if elapsed_s >= since * schedule.total_s][-1]
        if wanted != length:
            length = wanted
            batches = mixture.batches(rows=args.batch_tokens // length, length=length)
        factor = schedule.factor(step=trainer.step_count, elapsed_s=elapsed_s, decay_start_s=decay_start_s)
        loss = trainer.step(next(batches), factor=factor)
        mean = loss if math.isnan(mean) else 0.95 * mean + 0.05 * loss
        if trainer.step_count % 20 == 0:
            log.write(f"{trainer.step_count}\t{elapsed_s:.0f}\t{trainer.tokens}\t{mean:.4f}\t{factor:.3f}\t{length}\n")
            log.flush()
        if time.monotonic() - last_save > args.save_s:
            last_save = time.monotonic()
            trainer.save(args.out / "checkpoint.pt", elapsed_s=elapsed_s)
            tiny.export(trainer.net, tokenizer, args.out / "export")
            losses = {name: round(value, 3) for name, value in held_out_loss(trainer, held, length=length).items()}
            note = f"step {trainer.step_count} {elapsed_s / 60:.1f} min tokens {trainer.tokens} loss {mean:.3f}"
            print(note, "held out", losses, flush=True)
    trainer.save(args.out / "checkpoint.pt", elapsed_s=elapsed_s)
    tiny.export(trainer.net, tokenizer, args.out / "export")
    print(
        "done",
        trainer.step_count,
        "steps",
        trainer.tokens,
        "tokens",
        held_out_loss(trainer, held, length=length),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=DEFAULT_CORPUS)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint, log and export/ go there; kept out of git")
    parser.add_argument("--init", type=Path, help="begin with the weights and the tokenizer of an exported checkpoint")
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--decay-minutes", type=float, default=20)
    parser.add_argument("--batch-tokens", type=int, default=3072)
    parser.add_argument("--text-share", type=float, default=0.15, help="share of windows cut from books")
    parser.add_argument("--save-s", type=float, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="about 1.3 times as fast; needs a C++ compiler")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.init:
        tokenizer = Tokenizer.from_file(str(args.init / "tokenizer.json"))
    else:
        tokenizer = make_tokenizer(args.corpus, tiny.CONFIG["vocab_size"])
    net = tiny.Llama(tiny.CONFIG)
    if args.init:
        tiny.load(net, args.init)
    trainer = Trainer(net.to(args.device), compiled=args.compile)
    if (args.out / "checkpoint.pt").exists():
        trainer.resume(args.out / "checkpoint.pt")
    print("parameters", sum(p.numel() for p in net.parameters()), "resumed at", trainer.step_count, flush=True)
    train(trainer, tokenizer, args)


if __name__ == "__main__":
    main()
