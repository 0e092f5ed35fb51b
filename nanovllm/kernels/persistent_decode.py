"""A decode step of a few rows through whole runs of layers, each run one launch whose programs stay and exchange what
they compute; with few rows a launch for each product takes several times as long as its work.

There is no reference here: the layers' own modules are it. bfloat16 only, as numbers travel in half a word.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.choice import twin
from nanovllm.kernels.mamba_step import Drive

# Rows up to which it serves: as many as a tile has.
MOST_ROWS = 8
# Chips whose multiprocessors have the 144 KB that the widest tile takes: Hopper's and Blackwell's of data centers.
_CHIPS = ((9, 0), (10, 0), (10, 3))


def can_persist(x: torch.Tensor) -> bool:
    """Whether rows [R, d] may go that way."""
    fits = x.is_cuda and x.dtype == torch.bfloat16 and len(x) <= MOST_ROWS and twin("persistent") is not None
    return fits and torch.cuda.get_device_capability(x.device) in _CHIPS


class Run:
    """Layers that follow one another.

    Args:
        layers: for each norm, input projection, mixer's norm (q's), k's norm, output projection, MLP's norm, gate_up
            and down; None where there is none. Contiguous bfloat16, not to be moved.
        width: numbers of a row that programs exchange in a layer.
        inner: size of the MLP.
        programs: how many run; None for one on each multiprocessor, which is all that can run at once.
    """

    def __init__(
        self,
        layers: list[list[torch.Tensor | None]],
        width: int,
        inner: int,
        programs: int | None = None,
    ) -> None:
        device = layers[0][0].device
        addresses = [[0 if part is None else part.data_ptr() for part in parts] for parts in layers]
        self.table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.inner = inner
        self.has_mixer_norm = layers[0][2] is not None
        self.programs = programs or torch.cuda.get_device_properties(device).multi_processor_count
        # By number of rows, as every launch writes all words that it reads: a tag then never meets one that has been
        # left so long ago that it counts as new.
        self._words = torch.zeros(4, 4 + MOST_ROWS * width, dtype=torch.int32)
        self._words[:, 0] = 1  # the first tag is another than that of words that nobody has written
        self._words = self._words.to(device)

    def _scratch(self, num_rows: int) -> torch.Tensor:
        return self._words[(num_rows - 1).bit_length()]

    def self_decoder(
        self,
        x: torch.Tensor,
        num_heads: int,
        rotary: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rings: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        window: int,
        eps: float,
    ) -> torch.Tensor:
        """Sliding-window layers, over and over while there are rings.

        Args:
            x: [R, d] bfloat16, R <= MOST_ROWS.
            rotary, rows, window: as `window_decode` takes them.
            rings: keys and values [blocks, rows, n, KV, D], changed in place; block b is of layer b % layers.
            eps: of all norms.

        Returns:
            [R, d], the residual stream behind the last block.
        """
        rest = (num_heads, self.has_mixer_norm, eps, self.programs)
        kernel, words = twin("self_decoder"), self._scratch(len(x))
        return kernel.self_decoder(x, self.table, *rotary, rows, *rings, words, window, self.inner, *rest)

    def cross_decoder(
        self,
        x: torch.Tensor,
        attended: torch.Tensor | None,
        layers: tuple[int, int, int],
        attends: bool,
        q_size: int,
        memory: tuple[torch.Tensor, Drive, torch.Tensor],
        states: torch.Tensor,
        rows: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cross-Mamba layers that follow one another, and what lies between them and attention before and behind.

        Args:
            x: [R, d], the residual stream; it has not got yet what follows from `attended`.
            attended: [R, q_size], of the attention layer before them; None if there is none.
            layers: the first of them among this run's, the first of them among all with states, and how many.
            attends: an attention layer follows.
            memory: of all layers x [R, L, H, P], what drives the states (b of one group) and d [L, H].
            states: [rows, L, H, P, N] float32, changed in place.
            rows: [R] int64; a row that belongs to nobody may be there any number of times.
            eps: of all norms.

        Returns:
            [R, d], the residual stream behind them, and the next attention's queries [R, q_size].
        """
        conv, drive, d = memory
        rest = (states, rows, self._scratch(len(x)), self.inner, eps, self.programs, attends)
        kernel = twin("cross_decoder")
        return kernel.cross_decoder(x, attended, self.table, layers, q_size, (conv, *drive, d), *rest)
