"""Processes of a run on one machine listen on localhost only."""
import glob
import json
import os
import socket
import sys

import pytest

from alfx.bin import launch

pytestmark = pytest.mark.processes

_LISTENS = '0A'  # the state of a socket in /proc/net/tcp

RANK = f"""
import json, os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import torch
from test_listening import listening
from alfx.engine.remote import data_parallel
ranks = data_parallel.join(torch.device('cpu'))
ranks.broadcast_from_rank0('all are here')
with open(os.path.join(sys.argv[1], os.environ['RANK']), 'w') as file:
    json.dump([listening(os.getpid()), listening(os.getppid())], file)
ranks.broadcast_from_rank0('all have looked')
data_parallel.leave()
"""


def listening(pid):
    """Return the addresses that a process listens on, in the format of /proc/net."""
    inodes = set()
    for path in glob.glob(f'/proc/{pid}/fd/*'):
        try:
            inodes.add(os.readlink(path).removeprefix('socket:[').removesuffix(']'))
        except OSError:  # closed meanwhile
            continue
    found = []
    for table in ('tcp', 'tcp6'):
        with open(f'/proc/{pid}/net/{table}') as file:
            rows = [line.split() for line in file.readlines()[1:]]
        found += [row[1].split(':')[0] for row in rows if row[3] == _LISTENS and row[9] in inodes]
    return found


def is_loopback(address):
    """Return whether an address is in 127.0.0.0/8, also mapped to IPv6, or is ::1.

    Each group of four bytes is in the byte order of the machine, as in /proc/net.
    """
    words = [bytes.fromhex(address[i:i + 8])[::-1] for i in range(0, len(address), 8)]
    if len(words) == 1 or words[:3] == [b'\0' * 4, b'\0' * 4, b'\0\0\xff\xff']:
        return words[-1][0] == 127
    return b''.join(words) == socket.inet_pton(socket.AF_INET6, '::1')


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_ranks_and_their_launcher_listen_on_localhost_only(tmp_path):
    (tmp_path / 'rank.py').write_text(RANK)
    assert launch.launch([sys.executable, str(tmp_path / 'rank.py'), str(tmp_path)], 2) == 0
    found = [json.loads((tmp_path / rank).read_text()) for rank in '01']
    assert any(rank_sockets for rank_sockets, _ in found) and all(launcher_sockets for _, launcher_sockets in found)
    assert all(is_loopback(address) for both in found for addresses in both for address in addresses), found


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_an_open_port_would_be_seen():
    with socket.create_server(('0.0.0.0', 0)), socket.create_server(('127.0.0.1', 0)):
        assert sorted(map(is_loopback, listening(os.getpid())))[:2] == [False, True]
