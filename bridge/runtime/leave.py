"""The program of a rule with `leave_seconds`: wait, while a load balancer leaves this VM, until the event at most."""

import os
import sys
import time

time.sleep(min(float(sys.argv[1]), float(os.environ["IMDS_BRIDGE_SECONDS_LEFT"])))
