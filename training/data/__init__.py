# SPDX-License-Identifier: Apache-2.0
"""Where training tokens come from: files, sample order, blends, batches, loaders."""
