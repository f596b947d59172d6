# SPDX-License-Identifier: Apache-2.0
"""Import this first in a forkserver: Ctrl-C then ends it, and the ranks that it forks, silently.

The tool that started them prints that it was stopped. Without this, a forkserver that is still
importing torch prints a traceback.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
