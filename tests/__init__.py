"""No test makes an NVLink multicast object: it can put the GPUs of a shared host out of service."""

import os

from weaveopt.cli.calibrate import NO_MULTICAST

os.environ.update(NO_MULTICAST)
