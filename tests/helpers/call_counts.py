"""Costs that do not depend on the machine."""
import sys


def calls_within(function, *arguments) -> int:
    """Return the number of calls of functions, in Python and in C, that a call makes."""
    events = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return events.count('call') + events.count('c_call')
