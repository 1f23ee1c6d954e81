"""Changes to logits before sampling: logit_bias, min_tokens, penalties and grammars."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from llmsched.engine.executor.buffers import to_device
from llmsched.engine.grammar.compiler import token_masks
from llmsched.engine.request import Sequence


def bars_stop(sequence: Sequence) -> bool:
    """Return True if the sequence must not end yet because of min_tokens."""
    return sequence.num_output_tokens < sequence.sampling.min_tokens


class SeenTokens:
    """Sorted distinct token ids of one sequence, and the number of times that each id occurs in the output."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.ids: npt.NDArray[np.int64] = np.unique(np.array(sequence.token_ids, dtype=np.int64))
        output = np.array(sequence.token_ids[sequence.num_prompt_tokens :], dtype=np.int64)
        self.output_counts = np.zeros(len(self.ids), dtype=np.float32)
        np.add.at(self.output_counts, np.searchsorted(self.ids, output), 1)
        self._num_counted = sequence.num_tokens

    def catch_up(self) -> None:
        """Count the output tokens that the sequence has gained since the last call."""
        for token in self.sequence.token_ids[self._num_counted :]:
            place = int(np.searchsorted(self.ids, token))
            if place == len(self.ids) or self.ids[place] != token:
                self.ids = np.insert(self.ids, place, token)
                self.output_counts = np.insert(self.output_counts, place, 0)
            self.output_counts[place] += 1
        self._num_counted = self.sequence.num_tokens


class LogitEditor:
    """Editor that changes logits in place, in this order:

    - logit_bias is added to the logits of its ids.
    - While the output of a sequence has fewer than min_tokens tokens, the logits of its `stop_ids` become -inf. With a
      grammar, they do so only if the grammar allows other tokens.
    - repetition_penalty applies once to each distinct id of prompt and output: logits above 0 are divided by the
      penalty, others are multiplied by the penalty.
    - presence_penalty and frequency_penalty apply to the output: logit - frequency * count - presence * (count > 0).
    - The logits of tokens that the grammar of a sequence does not allow next become -inf.
    """

    def __init__(self) -> None:
        self._seen: dict[str, SeenTokens] = {}
        self.mask_seconds = 0.0  # that the host has spent on masks of grammars

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._seen.pop(request_id, None)

    def needs(self, sequence: Sequence) -> bool:
        """Return True if `edit` may change the sequence's logits."""
        if sequence.sampling.logit_bias or sequence.matcher is not None:
            return True
        return sequence.sampling.has_penalties or bars_stop(sequence)

    def edit(self, logits: torch.Tensor, sequences: ListLike[Sequence]) -> None:
        """Change logits [R, V] (fp32) in place. Row i belongs to sequences[i]. Ids in logit_bias must be below V."""
        device, width = logits.device, logits.shape[1]
        biases = [sequence.sampling.logit_bias for sequence in sequences]
        ids = [np.fromiter(bias.keys(), np.int64, len(bias)) for bias in biases]
        if where := locate(device, range(len(biases)), ids):
            values = [np.fromiter(bias.values(), np.float32, len(bias)) for bias in biases]
            logits[where] += to_device(np.concatenate(values), device)

        rows = [row for row, each in enumerate(sequences) if bars_stop(each) and each.stop_ids and each.matcher is None]
        barred = [[token for token in sequences[row].stop_ids if 0 <= token < width] for row in rows]
        if where := locate(device, rows, [np.array(tokens, dtype=np.int64) for tokens in barred]):
            logits[where] = float("-inf")

        rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.has_penalties]
        seen = [self._seen_by(sequences[row]) for row in rows]
        if where := locate(device, rows, [each.ids for each in seen]):
            counts = to_device(np.concatenate([each.output_counts for each in seen]), device)
            samplings = [sequence.sampling for sequence in sequences]
            settings = [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for s in samplings]
            table = to_device(np.array(settings, dtype=np.float32), device)
            repetition, presence, frequency = table[where[0]].unbind(1)
            old = logits[where]
            repeated = torch.where(old > 0, old / repetition, old * repetition)
            logits[where] = repeated - frequency * counts - presence * (counts > 0)

        rows = [row for row, sequence in enumerate(sequences) if sequence.matcher is not None]
        if rows:
            matchers = [matcher for sequence in sequences if (matcher := sequence.matcher) is not None]
            must_go_on = {place: sequences[row].stop_ids for place, row in enumerate(rows) if bars_stop(sequences[row])}
            begun = time.perf_counter()
            masks = token_masks(matchers, must_go_on)
            self.mask_seconds += time.perf_counter() - begun
            limits = ceilings(masks, width, device)
            if len(rows) == len(logits):
                torch.minimum(logits, limits, out=logits)
            else:
                some = to_device(np.array(rows, dtype=np.int64), device)
                logits[some] = torch.minimum(logits[some], limits)

    def _seen_by(self, sequence: Sequence) -> SeenTokens:
        known = self._seen.get(sequence.request_id)
        if known is None or known.sequence is not sequence:
            known = self._seen[sequence.request_id] = SeenTokens(sequence)
        known.catch_up()
        return known


@cache
def _ceiling_table(device: torch.device) -> torch.Tensor:
    """Return the ceilings [256, 8] of the eight tokens of each byte of a mask."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return to_device(np.where(bits, np.float32(np.inf), np.float32(-np.inf)), device)


def ceilings(masks: npt.NDArray[np.uint8], width: int, device: torch.device) -> torch.Tensor:
    """Return the largest values [N, width] (fp32) that logits may have under masks of bits [N, B]: inf or -inf.

    Tokens beyond the masks are not allowed.
    """
    # The minimum of logits and ceilings takes a CPU a tenth of the time of `masked_fill_`.
    places = to_device(masks.reshape(-1), device).int()
    found = _ceiling_table(device).index_select(0, places).view(len(masks), -1)[:, :width]
    missing = width - found.shape[1]
    return torch.nn.functional.pad(found, (0, missing), value=float("-inf")) if missing else found


def locate(
    device: torch.device, rows: ListLike[int], ids: ListLike[npt.NDArray[np.int64]]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return an index that selects the logits (rows[i], id) for each id in ids[i], or None if there are no ids.

    The index is a pair of tensors on `device`: rows and ids. No pair (row, id) may occur twice.
    """
    lengths = [len(each) for each in ids]
    if not sum(lengths):
        return None
    flat_rows = np.repeat(np.array(rows, dtype=np.int64), lengths)
    return to_device(flat_rows, device), to_device(np.concatenate(ids), device)
