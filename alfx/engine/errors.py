"""What goes wrong between processes."""


class LostProcessError(RuntimeError):
    """A process that a run needs is gone; the parameters of this one are sound.

    The trainer answers with a regular checkpoint, and the run ends with exit code 1 and this message: the same command
    goes on from there.

    Args:
        process: which one: 'the unroll process (pid 12)'.
        ending: how it ended: 'was killed by SIGKILL'.
        last_words: the end of its traceback or of its log; '' if there is none.
        hint: what to do; '' for nothing in particular.
    """

    def __init__(self, process: str, ending: str, last_words: str = '', hint: str = ''):
        message = f'{process} {ending}'
        if hint:
            message += f'\n  {hint}'
        if last_words.strip():
            message += '\n  its last words:\n' + '\n'.join(f'    {line}' for line in last_words.rstrip().split('\n'))
        super().__init__(message)
        self.process, self.ending, self.last_words, self.hint = process, ending, last_words, hint

    def __reduce__(self) -> tuple:
        return type(self), (self.process, self.ending, self.last_words, self.hint)


def describe_exit(exitcode: int | None) -> str:
    """How a process ended, in words.

    Args:
        exitcode: as of ``multiprocessing.Process.exitcode``: negative for a signal, ``None`` if it is not known.
    """
    import signal
    if exitcode is None:
        return 'does not answer any more'
    if exitcode >= 0:
        return f'ended with exit code {exitcode}'
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:  # a real-time signal
        name = f'signal {-exitcode}'
    return f'was killed by {name}' + (' (often for want of memory)' if name == 'SIGKILL' else '')


class NonFiniteLossError(RuntimeError):
    """A loss is NaN or infinite. It is raised before the update, so that all parameters are still good."""
