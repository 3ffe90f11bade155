"""All distillation losses by name, in one place: divergences.py, features.py and relations.py hold them."""

from compress.distill.divergences import (
    DIVERGENCES,
    Divergence,
    collapse,
    cross_entropy,
    divergence,
    forward_kl,
    generalized_jsd,
    jensen_shannon,
    mix,
    reverse_kl,
    total_variation,
)
from compress.distill.features import (
    Projection,
    gradient_l2,
    hidden_cosine,
    hidden_mse,
    maximum_mean_discrepancy,
    median_bandwidth,
    output_gradient,
    weight_l2,
)
from compress.distill.relations import angle_relations, distance_relations, layer_relations, layer_similarity

__all__ = [
    "DIVERGENCES",
    "Divergence",
    "Projection",
    "angle_relations",
    "collapse",
    "cross_entropy",
    "distance_relations",
    "divergence",
    "forward_kl",
    "generalized_jsd",
    "gradient_l2",
    "hidden_cosine",
    "hidden_mse",
    "jensen_shannon",
    "layer_relations",
    "layer_similarity",
    "maximum_mean_discrepancy",
    "median_bandwidth",
    "mix",
    "output_gradient",
    "reverse_kl",
    "total_variation",
    "weight_l2",
]
