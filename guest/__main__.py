"""`python3 -m guest`: the supervisor."""

import sys

from guest.supervisor import main

main(sys.argv[1:])
