"""Where the keys and values of a layer lie, what they are before the cache, and how the layer attends to them."""

from dataclasses import dataclass

from torch import Tensor

from runtime.checkpoints.record import Architecture
from runtime.contract import CacheBasis, CacheKind
from runtime.kernels.triton.attention_decode import Heads
from runtime.kernels.triton.elementwise import rms_norm
from runtime.kv_store import Store
from runtime.model.layers import Attention
from runtime.model.triton.latent import of_latent


@dataclass(frozen=True, eq=False)
class Memory:
    """Where keys and values go: for each shape of keys (record.Architecture.key_groups) a pool of blocks of 64, how all
    hold them, and what keys are divided by.

    factors (layers, kv_heads, head_dim) float32 or None; bases: what they are written in, or None.
    keys    the most keys that a row of this forward sees; sharing: adjacent rows of one request, most of the time.
    """

    stores: tuple[Store, ...]
    kind: CacheKind
    factors: tuple[Tensor | None, ...]
    bases: tuple[CacheBasis | None, ...]
    keys: int
    sharing: int

    def of(self, number: int) -> tuple[Store, int, Tensor | None, CacheBasis | None]:
        """The pool that holds the cache's layer `number`, the layer's place in it, its factors and its basis."""
        for store, factor, basis in zip(self.stores, self.factors, self.bases, strict=True):
            if number < len(store.keys):
                own = None if basis is None else CacheBasis(basis.keys[number], basis.values[number])
                return store, number, None if factor is None else factor[number], own
            number -= len(store.keys)
        raise IndexError(number)


def heads_of(a: Architecture, number: int) -> Heads:
    """How a layer attends, but for what its weights say."""
    kv, dim = a.shape(number)
    value_dim = None if a.latent is None else a.latent.rank
    return Heads(a.heads, kv, dim, a.scaling, None, None, a.chunked, value_dim, a.softcap)


def projected(
    made: tuple[Tensor, ...], weights: Attention, heads: Heads, a: Architecture
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (T, heads · d), keys and values as rotate_and_store takes them, of what `weights.qkv` made."""
    if weights.latent is not None:
        assert a.latent is not None
        return of_latent(made[0], made[1], weights.latent, a.latent, a.heads)
    q, *kv = made
    k, v = (kv[0], kv[-1]) if kv else (q[:, :0], q[:, :0])
    if weights.v_norm is not None:
        v = rms_norm(v.reshape(-1, heads.dim), weights.v_norm, a.norm_eps).view(v.shape)
    return q, k, v
