# SPDX-License-Identifier: Apache-2.0
"""Turn a command line into one checked Config.

parse                   from a command line to a Config, or to an error in one sentence
help                    --help: where to start, a group, a flag
flag_table              the flags of this program: live and removed ones
megatron                reads megatron.toml: Megatron-LM's other flags, other programs' names
foreign                 translates or refuses such flags; --ignore-flags
derived                 settings that are derived from others
rules                   the rules between flags; size_rules, parallel_rules, compute_rules,
                        expert_rules, run_rules: those of one subject
model_sizes             the model's sizes, as a Config or a checkpoint gives them
saved_schedule          the learning rate's curve from a checkpoint
data_stages             the file of --data-stages

The settings themselves are in training/settings/.
"""
