"""Run a script with a data set whose loss counts only the last 15 % of each sample, as fine-tuning on answers does.

usage: answer_only.py SCRIPT ARGS...   (the script's own code stays as it is)
"""

import os
import runpy
import sys

from megatron.core.datasets.gpt_dataset import GPTDataset

whole_sample = GPTDataset.__getitem__


def answer_only(self, index):
    sample = dict(whole_sample(self, index))
    mask = sample["loss_mask"].clone()
    mask[: mask.numel() * 85 // 100] = 0
    return {**sample, "loss_mask": mask}


GPTDataset.__getitem__ = answer_only
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
