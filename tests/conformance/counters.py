"""Run a script, printing what Megatron-LM counts for each step: floating point operations, and samples by the end of it; and which
rank reads a sample of the data.

usage: counters.py SCRIPT ARGS...   (the script's own code stays as it is)
"""

import os
import runpy
import sys

from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training import global_vars, training

count = training.num_floating_point_operations


def counted(args, batch_size, *rest, **named):
    operations = count(args, batch_size, *rest, **named)
    if int(os.environ["RANK"]) == 0:
        samples = global_vars.get_args().consumed_train_samples
        print(f"counted: {operations:.0f} operations for {batch_size} samples, {samples} so far", flush=True)
    return operations


def read(self, index):
    print(f"read by rank {os.environ['RANK']}", flush=True)
    return whole_sample(self, index)


whole_sample = GPTDataset.__getitem__
GPTDataset.__getitem__ = read
training.num_floating_point_operations = counted
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
