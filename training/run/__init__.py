# SPDX-License-Identifier: Apache-2.0
"""What a process does around its steps.

start           everything before step 1, in order; rendezvous, same_settings, trial, autotune and
                warm_up are parts of it
process         how a process ends: mistakes in one sentence, exit codes
state, step     Run, the state of a rank; Step, Decision and combine: what follows a step
saver, resume   write and read checkpoints; saved_state: their contents; same_run: which
                checkpoints a run may resume; settings_changed: which flags differ
export          Hugging Face folders next to the saves
stop            stopping on signals and time limits, agreed by all ranks
restarts        messages from an attempt to the next one, under torchrun --max-restarts
log, output, layer_values, expert_values    the log: lines, JSON, TensorBoard, W&B
memory_report, device, gpu_health, peak_flops, attention    the device
model_profile, pipeline_stages, context_parallel, matrices    the model's FLOPs and how the model is
                split over the ranks
gpus, text, waiting    GPU data sheets; tables and progress for a terminal
sample          prints a text that the model continues
watch           watchers of each step
"""
