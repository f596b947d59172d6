# SPDX-License-Identifier: Apache-2.0
"""The settings of a run, and their translation into options of mpu.

arguments            the table: one dataclass per group of --help, one field per flag
setting              a row of the table, and the rules that parse and check its value
config               Config: the settings of a run, read-only
param_groups         --param-group: parameters selected by patterns of their names
batch_size           the batch size over the run, and the number of micro-batches
learning_rate        the learning-rate schedule
stages               where the stages of a run begin
layer_options        options of the layers: experts, fused kernels, recomputation, offload
float8_layers, expert_options, update_rules, zero_config, nccl, pipeline_schedule
                     the options of mpu for the flags of one subject
"""
