"""Run a script with a data set whose samples are packed: several short documents, each ended by token 17.

usage: packed.py SCRIPT ARGS...   (the script's own code stays as it is)
"""

import os
import runpy
import sys

from megatron.core.datasets.gpt_dataset import GPTDataset

END = 17
whole_sample = GPTDataset.__getitem__


def packed(self, index):
    sample = dict(whole_sample(self, index))
    tokens, labels = sample["tokens"].clone(), sample["labels"].clone()
    length = tokens.numel()
    for end in {5 + (index or 0) % 7, length // 3, length // 2, length // 2 + 1, length * 4 // 5}:
        tokens[end] = labels[end - 1] = END
    return {**sample, "tokens": tokens, "labels": labels}


GPTDataset.__getitem__ = packed
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
