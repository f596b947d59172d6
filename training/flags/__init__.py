# SPDX-License-Identifier: Apache-2.0
"""Turn a command line into one checked Config.

parse                   the command line becomes a Config, or one sentence
help                    --help: where to start, a group, a flag
table                   which flags are live, checked, refused or removed
megatron                Megatron-LM's other flags, each with its reason
trees                   flags of trees derived from Megatron-LM, and other names
foreign                 the answer to a flag that is not available; --ignore-flags
rules                   the rules between flags: size_, parallel_, compute_ and run_rules
model_sizes             the model's sizes, as a Config or a checkpoint gives them
saved_schedule          the learning rate's curve from a checkpoint

The settings are fields of training/arguments.py.
"""
