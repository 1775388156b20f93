"""The program of a rule with `leave_seconds`: wait, while a load balancer leaves this VM, until the event at most."""

import os
import sys
import time

SPARE_SECONDS = 2.0  # to be known as prepared, and approved, before the event starts

left_seconds = float(os.environ["IMDS_BRIDGE_SECONDS_LEFT"]) - SPARE_SECONDS
time.sleep(max(0.0, min(float(sys.argv[1]), left_seconds)))
