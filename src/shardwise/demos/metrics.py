"""How good predicted clicks are.

auc(scores=[-1, 2, 0], labels=[0, 1, 1])    1.0: both clicks have higher scores than the other
"""

import math

import torch.nn.functional as F
from torch import Tensor


def auc(scores: Tensor, labels: Tensor) -> float:
    """The area under the ROC curve: how often a 1 has a higher score than a 0, of all pairs; ties count half.

    Exact, as the rank sum of Mann and Whitney. nan if there is no 1 or no 0.

    Args:
        scores: [examples], of any scale.
        labels: [examples], 0 or 1.
    """
    ones = labels.double()
    num_ones = float(ones.sum())
    num_pairs = num_ones * (len(labels) - num_ones)
    if not num_pairs:
        return math.nan
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    last = counts.double().cumsum(0)
    ranks = last - (counts - 1) / 2  # from 1; the mean of those of equal scores
    return (float((ranks[place] * ones).sum()) - num_ones * (num_ones + 1) / 2) / num_pairs


def normalised_entropy(logits: Tensor, labels: Tensor) -> float:
    """The mean log loss, over that of predicting the mean of the labels for all: below 1 is better than that.

    He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", 2014. nan if there is no 1 or no 0.

    Args:
        logits: [examples], log-odds of a 1.
        labels: [examples], 0 or 1.
    """
    ones = labels.double()
    mean = float(ones.mean()) if len(ones) else 0.0
    if not 0 < mean < 1:
        return math.nan
    loss = float(F.binary_cross_entropy_with_logits(logits.double(), ones))
    return loss / -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean))
