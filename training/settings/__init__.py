# SPDX-License-Identifier: Apache-2.0
"""The settings of a run, and what they mean for the parts that mpu is made of.

arguments            the table: one dataclass a group of --help, one field a flag
setting              what a row of the table consists of
config               Config: the settings of a run, read only
param_groups         --param-group: parameters by patterns of their names
batch_size           the batch over the run, and its micro-batches
learning_rate        the schedules of the learning rate and the weight decay
stages               where the stages of a run begin
layer_options        what the layers are told: recipes of float8, experts, fused kernels
float8_layers, expert_options, update_rules, zero_config, nccl, pipeline_schedule
                     what the flags of one subject mean for mpu
"""
