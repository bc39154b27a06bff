"""What the kernel that penalises is to find, in NumPy."""

from __future__ import annotations

import numpy as np


def penalised_step(
    x: np.ndarray,
    tokens: np.ndarray,
    places: np.ndarray,
    words: np.ndarray,
    counts: np.ndarray,
    spans: np.ndarray,
    penalties: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The logits, words, counts and spans behind a step; see :func:`.penalise_rows.penalise_rows`. Counts are made anew
    from each row's words; entries behind its length count as the words that they repeat."""
    out, words, counts, spans = x.astype(np.float32), words.copy(), counts.copy(), spans.copy()
    for index, place in enumerate(places.tolist()):
        if place < 0:
            continue
        length = int(spans[place, 0])
        words[place, length] = tokens[index]
        spans[place, 0] = length + 1
        row = words[place]
        for kind, window in enumerate(spans[place, 1:4].tolist()):
            seen = row[max(length + 1 - window, 0) : length + 1]
            counts[kind, place] = (row[:, None] == seen[None]).sum(axis=1)
        last = {int(word): entry for entry, word in enumerate(row[: length + 1])}
        counts[3, place] = 0
        counts[3, place, list(last.values())] = 1
        repetition, presence, frequency = (np.float32(each) for each in penalties[place, :3])
        for word, entry in last.items():
            if word >= x.shape[1]:
                continue
            value = out[index, word]
            if counts[0, place, entry] > 0:
                value = value / repetition if value > 0 else value * repetition
            if counts[1, place, entry] > 0:
                value = value - presence
            out[index, word] = value - frequency * np.float32(counts[2, place, entry])
    return out, words, counts, spans
