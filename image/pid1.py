#!/usr/bin/python3 -ISB
"""PID 1 of a guest, installed as /usr/lib/microvm/init: hands over to the supervisor.

Isolated, without `site` and without writing bytecode: nothing that a job leaves behind changes what runs
as root, and the start is shorter. It must not do anything else; the neighbour is `guest.supervisor`.
"""

import sys

sys.path.insert(0, "/usr/lib/microvm")

from guest.supervisor import main

main([])
