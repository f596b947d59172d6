# SPDX-License-Identifier: Apache-2.0
"""What a process does around its steps.

start           what comes before step 1, in order; rendezvous, same_settings, trial, autotune and
                warm_up are parts of it
process         how a process ends: a mistake in one sentence, exit codes
state, step     Run, the state of a rank; Step, Decision and combine, what follows a step
saver, resume   write and read checkpoints; saved_state: what they hold; same_run: what may
                resume; settings_changed: which flags differ
export          Hugging Face folders next to the saves
stop            signals and time, agreed by all ranks
restarts        what an attempt leaves to the next one, under torchrun --max-restarts
log, output, layer_values, expert_values    the log: lines, JSON, TensorBoard, W&B
memory_report, device, gpu_health, peak_flops, attention    the device
model_profile, pipeline_stages, context_parallel, matrices    the model's FLOPs and who gets what
gpus, text, waiting    rows of data sheets; tables and progress for a terminal
sample          a text that the model continues
watch           what watches a step
"""
