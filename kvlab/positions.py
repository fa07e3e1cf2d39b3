"""Which position each token has, and the one check that tells.

    prompt of 5: positions 0 1 2 3 4      seq_len 5
    1st decode:  position  5              seq_len 6      position = seq_len - 1
    2nd decode:  position  6              seq_len 7

A position is a property of the token, not of the batch and not of the step: the number of
real tokens before it in its own sequence. seq_len counts the token being fed.
"""

from __future__ import annotations

import torch

from kvlab.errors import KvlabError


class WrongPosition(KvlabError, AssertionError):
    """A token was about to be rotated by a position that is not its own."""


def step_positions(num_cached: int, num_new: int) -> torch.Tensor:
    """Positions [num_new] of the next tokens of a sequence: num_cached, num_cached + 1, ...

    Prefill has num_cached 0, decode num_new 1, a draft or a chunk any other pair.
    """
    if num_cached < 0 or num_new < 0:
        raise WrongPosition(f"{num_cached} cached and {num_new} new tokens, expected both >= 0")
    return torch.arange(num_cached, num_cached + num_new)


def padded_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions [batch, length] of a left-padded batch: each row counts its own real tokens.

    [[0,0,1,1,1], [1,1,1,1,1]] -> [[0,0,0,1,2], [0,1,2,3,4]]

    The value in a padded place is 0 and means nothing: no query may read its key.
    """
    mask = attention_mask.to(torch.long)
    return (mask.cumsum(-1) - 1).clamp(min=0) * mask


def check_positions(positions: torch.Tensor, seq_lens: torch.Tensor | int) -> None:
    """Raise WrongPosition unless the last position of every row is seq_len - 1.

    positions  [q_len] or [batch, q_len], each row ascending by one
    seq_lens   [] or [batch], cached plus new tokens; an idle row (0) expects position 0

    Right for rows without padding in the query. This is the check that no output test replaces:
    if every position is shifted alike, no output changes.
    """
    lengths = torch.as_tensor(seq_lens).reshape(-1)
    rows = positions.reshape(1, -1) if positions.dim() == 1 else positions
    if rows.dim() != 2 or rows.shape[1] == 0 or lengths.numel() not in (1, rows.shape[0]):
        raise WrongPosition(
            f"positions of shape {list(positions.shape)} and {lengths.numel()} seq_lens given, "
            f"expected [q_len] or [batch, q_len] with at least one position a row, and one seq_len "
            f"for each row or one for all. Check one forward's positions with its own seq_lens."
        )
    expected = (lengths - 1).clamp(min=0).expand(rows.shape[0])
    last = rows[:, -1]
    if not torch.equal(last, expected.to(last.dtype)):
        raise WrongPosition(
            f"the last positions are {last.tolist()} at seq_lens {lengths.tolist()}, "
            f"expected seq_lens - 1 = {expected.tolist()}. Take positions from the number of "
            "cached tokens at the step, not from a counter kept beside it."
        )
    if rows.shape[1] > 1 and not bool(((rows[:, 1:] - rows[:, :-1]) == 1).all()):
        raise WrongPosition(
            f"positions {rows.tolist()} do not ascend by one within each row; each new token "
            "has the position of the one before it plus 1"
        )


def next_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions [batch, 1] of the token that follows each row of a left-padded batch.

    [[0,0,1,1,1], [1,1,1,1,1]] -> [[3], [5]]: the number of real tokens, not of columns.
    """
    return attention_mask.to(torch.long).sum(-1, keepdim=True)
