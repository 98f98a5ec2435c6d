"""Opens the rendezvous of a run: the meeting of its launchers, and the store that the ranks use.

On one machine, the store is on loopback. With several machines, one launcher is the *server*. Its
store is on loopback too, behind an *auth proxy*, which listens for the other machines and checks
the token. The other launchers connect to the proxy. Each of them has a *forwarder*, which carries
connections of its machine through the proxy to the store. `Peers` is a launcher's table of all
launchers (*nodes*). For etcd and other backends, torch's own rendezvous is used.

Which launcher is the server follows torchrun's rules: node 0 with --node-rank, --master-addr and
--master-port; with c10d the node on the machine that --rdzv-endpoint names, or the one whose
--rdzv-conf says `is_host=1`.

Sources: torch/distributed/elastic/rendezvous/{api,static_tcp_rendezvous,dynamic_rendezvous}.py.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from enum import Enum
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from lockstep import __version__
from lockstep.errors import (
    MasterUnreachableError,
    PortTakenError,
    SettingError,
    TokenDiffersError,
)
from lockstep.machine import network
from lockstep.machine.network import LOOPBACK, Endpoint
from lockstep.run.machines import auth
from lockstep.run.machines.auth import AuthProxy, ConnectionFailed, Forwarder, authenticate
from lockstep.run.machines.dynamic_rendezvous import DynamicRendezvous
from lockstep.run.machines.network_thread import NetworkThread
from lockstep.run.machines.nodes import SERVER_NUMBER, Node, Peers
from lockstep.run.machines.peer_connection import (
    PeerConnection,
    PeerServer,
    join_server,
    receive_changes,
)
from lockstep.run.machines.rendezvous import Rendezvous, Say
from lockstep.run.machines.rendezvous_settings import join_timeout, read_endpoint, store_timeout
from lockstep.run.machines.run_token import TOKEN_VARIABLE, find_token
from lockstep.run.machines.static_rendezvous import StaticRendezvous
from lockstep.run.machines.torch_rendezvous import TorchRendezvous
from lockstep.run.machines.wait_announcer import WaitAnnouncer
from lockstep.run.start.machine import loopback_name

SERVER = "the node that serves"
RETRY_INTERVAL_S = 0.25
OTHER_SERVER_TIMEOUT_S = 1.0
"""How long a launcher that should be the server tries to reach another one that already is."""
WRONG_SERVICE_TIMEOUT_S = 10.0
"""How long another program may listen at the port before we give up: it may be about to end."""


def open_rendezvous(
    parameters: RendezvousParameters, say: Say, environ: Mapping[str, str] = os.environ
) -> Rendezvous:
    """Opens the rendezvous of a run.

    On one machine and on the server, this returns at once; on other nodes, when the server has
    admitted them. The nodes wait for each other in `next_rendezvous`.

    With several machines this starts threads, which a fork does not copy. So processes that are
    forked from this one are forked before this is called.

    Args:
        parameters: torchrun's flags for the rendezvous.
        say: function that shows a line to the user; it may be called from any thread.
        environ: environment variables, from which the token is read.

    Raises:
        SettingError: flags contradict each other or are malformed, or there is no token.
        PortTakenError: the port is used by another program.
        MasterUnreachableError: there is no server; the error says what was found instead.
        DuplicateRankError: another node has already come with this node rank.
        WorldSizeError: `--nnodes` differs from the server's.
        TokenDiffersError: the token differs from the server's.
    """
    own = _own_node(parameters)
    if _needs_torch_rendezvous(parameters):
        # Launchers that meet by torch's rendezvous cannot tell each other about ranks that hang.
        say(
            f"--rdzv-backend {parameters.backend}: torch's own rendezvous; its store asks for no "
            "token and listens on all interfaces of the node of rank 0, and ranks that hang on "
            "several machines are not reported"
        )
        return TorchRendezvous(parameters, Peers(own), say)

    if parameters.max_nodes > 1:
        return _MultiNodeOpener(parameters, own, say, environ).open()

    if parameters.backend == "static":
        # The user's port becomes the ranks' MASTER_PORT.
        endpoint = read_endpoint(parameters)
    else:
        # With c10d, the user's port only serves to find the other nodes. There are none, so any
        # free port (0) will do.
        endpoint = Endpoint(LOOPBACK, 0)
    try:
        store = network.serve_store(LOOPBACK, endpoint.port, store_timeout(parameters))
    except OSError as error:
        raise network.explain_listening_error(error, endpoint) from None
    return StaticRendezvous(parameters, Peers(own), store, say, loopback_name())


def _own_node(parameters: RendezvousParameters) -> Node:
    """Creates the `Node` that describes this launcher to the others.

    Raises:
        SettingError: the --node-rank is out of range.
    """
    is_static = parameters.backend == "static"
    num_nodes = parameters.max_nodes
    if is_static or num_nodes == 1:
        rank = int(parameters.get("rank", 0))  # of --node-rank, or of --rdzv-conf
    else:
        rank = None  # the dynamic rendezvous determines it

    if is_static and rank not in range(num_nodes):
        raise SettingError(
            f"--node-rank {rank} with --nnodes {num_nodes}",
            f"node ranks count from 0 to {num_nodes - 1}",
            "give each machine its own --node-rank",
        )

    min_nodes = num_nodes if is_static else parameters.min_nodes
    return Node(
        number=SERVER_NUMBER,  # if another launcher is the server, it gives this one its number
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        run_id=parameters.run_id,
        nodes=f"{min_nodes}:{num_nodes}",  # the server refuses a node with another --nnodes
        version=__version__,
    )


def _needs_torch_rendezvous(parameters: RendezvousParameters) -> bool:
    """Returns True if the backend, or its type of store, is not implemented in Lockstep."""
    is_implemented_backend = parameters.backend in ("static", "c10d")
    if not is_implemented_backend:  # such as etcd
        return True

    # Lockstep's store has the type "tcp". With "static", there is no other type. On a single node,
    # Lockstep uses its own store even if the user has chosen another type, as no other node has to
    # find it.
    if parameters.backend == "static" or parameters.max_nodes <= 1:
        return False

    # With c10d and several nodes, the user may choose one: `--rdzv-conf store_type=file`.
    store_type = str(parameters.get("store_type", "tcp")).strip().lower()
    return store_type != "tcp"


class _ServerChoice(Enum):
    """Whether this node is the server, and who says so.

    If another program has already taken the port, a server by flags looks only for a moment whether
    that program serves the run. A server by guess tries for the whole join timeout.
    """

    SERVE_BY_FLAGS = "the flags say that this node is the server"
    SERVE_BY_GUESS = "the endpoint names this machine, so this node may be the server"
    CONNECT = "another node is the server"


class _MultiNodeOpener:
    """Opens the rendezvous for one of several nodes: serves the run, or connects to the server."""

    def __init__(
        self, parameters: RendezvousParameters, own: Node, say: Say, environ: Mapping[str, str]
    ) -> None:
        self._parameters = parameters
        self._own = own
        self._say = say
        self._endpoint = read_endpoint(parameters)
        self._token = find_token(environ)
        self._timeout = join_timeout(parameters)

    def open(self) -> Rendezvous:
        """Opens the rendezvous; see `open_rendezvous`."""
        choice = self._choose_server()
        if choice == _ServerChoice.CONNECT:
            return self._connect(self._timeout)
        return self._serve_unless_served(is_server_by_flags=choice == _ServerChoice.SERVE_BY_FLAGS)

    def _serve_unless_served(self, *, is_server_by_flags: bool) -> Rendezvous:
        """Serves the run, or connects to the launcher that already serves it.

        Args:
            is_server_by_flags: True if the flags say that this node is the server. Then there
                should be no other one, so this only looks for one for a moment.
        """
        # If the endpoint names another machine, a launcher there may have been started as node 0,
        # too, and serve the run.
        endpoint = self._endpoint
        if is_server_by_flags and not _is_this_machine(endpoint.host):
            with suppress(MasterUnreachableError):
                return self._connect(OTHER_SERVER_TIMEOUT_S)
            # Nobody serves there. So this machine does: the user may forward that port to it.

        address = network.serving_address(endpoint, self._parameters.local_addr)
        try:
            listener = network.listening_socket(address, endpoint.port)
        except OSError as os_error:
            cannot_listen = network.explain_listening_error(os_error, endpoint)
            if isinstance(cannot_listen, PortTakenError):
                return self._connect_to_user_of_port(cannot_listen, is_server_by_flags)
            raise cannot_listen from None

        return self._serve(listener)

    def _connect_to_user_of_port(
        self, port_taken: PortTakenError, is_server_by_flags: bool
    ) -> Rendezvous:
        """Connects to the program that uses the port, which may be a launcher that serves the run.

        Args:
            port_taken: error that is raised if no launcher of this run uses the port.
            is_server_by_flags: True if a flag, such as --node-rank 0, makes this node the server.
        """
        # If the flags say that this node is the server, there should be no other one, so this does
        # not wait long for one.
        timeout = OTHER_SERVER_TIMEOUT_S if is_server_by_flags else self._timeout
        try:
            return self._connect(timeout)
        except MasterUnreachableError:
            raise port_taken from None  # the program is no launcher, or serves another run
        except TokenDiffersError:
            raise port_taken from None  # it is a launcher with another token, so of another run

    def _choose_server(self) -> _ServerChoice:
        """Decides whether this node is the server, by torchrun's rules.

        Raises:
            SettingError: `is_host` in --rdzv-conf is neither yes nor no.
        """
        if self._parameters.backend == "static":
            is_server = self._own.rank == 0
            return _ServerChoice.SERVE_BY_FLAGS if is_server else _ServerChoice.CONNECT

        try:
            is_host = self._parameters.get_as_bool("is_host")
        except ValueError:
            value = self._parameters.get("is_host")
            raise SettingError(
                f"--rdzv-conf is_host={value}", "neither yes nor no", "write 1 or 0"
            ) from None
        if is_host is not None:
            return _ServerChoice.SERVE_BY_FLAGS if is_host else _ServerChoice.CONNECT

        host = self._endpoint.host
        if host in ("localhost", socket.gethostname()) or _is_this_machine(host):
            return _ServerChoice.SERVE_BY_GUESS
        return _ServerChoice.CONNECT

    def _serve(self, listener: socket.socket) -> Rendezvous:
        """Serves the store, behind an auth proxy that accepts connections.

        Args:
            listener: the socket that listens at the endpoint of the run.

        Returns:
            The rendezvous, which closes everything when it is closed.
        """
        address = str(listener.getsockname()[0])
        store = network.serve_store(LOOPBACK, 0, store_timeout(self._parameters))
        peers = Peers(self._own)

        with ExitStack() as resources:  # closed here only after an error
            thread = resources.enter_context(closing(NetworkThread()))
            server = PeerServer(peers, self._say)
            _send_changes_by_server(thread, server, peers)

            # The proxy carries connections of ranks to the store, and hands those of other
            # launchers to `serve_client`.
            proxy = AuthProxy(self._token, store.port, server.serve_client, self._say)
            thread.run(proxy.listen(listener))  # from now on, other launchers can connect

            # The callbacks are called in reverse order: the server, the proxy, then the thread.
            resources.callback(lambda: thread.run(proxy.close()))
            resources.callback(lambda: thread.run(server.close()))

            if self._token.open_to_all:  # the user wants no protection by a token
                place = Endpoint(address, self._endpoint.port)
                self._say(f"{TOKEN_VARIABLE}=none: anyone who can reach {place} can join this run")

            rendezvous = self._make_rendezvous(peers, store, address)
            rendezvous.resources = resources.pop_all()
            return rendezvous

    def _connect(self, timeout: float) -> Rendezvous:
        """Connects to the server, and starts a forwarder through which its store is reached.

        This launcher then has two connections to the server's machine: one over which the launchers
        tell each other their changes, and the forwarder's, for the store.

        Args:
            timeout: the time within which the server must answer, in seconds.
        """
        with ExitStack() as resources:  # closed here only after an error
            thread = resources.enter_context(closing(NetworkThread()))
            server_address, streams = self._authenticate(thread, timeout)
            connection = PeerConnection(streams.reader, streams.writer)
            resources.callback(lambda: thread.run(connection.close()))

            peers = self._join(thread, connection, server_address)
            forwarder, forwarder_port = self._start_forwarder(thread, server_address, resources)
            _start_exchanging_changes(thread, connection, peers, forwarder)
            store = self._connect_to_store(forwarder_port)

            own_address = str(streams.writer.get_extra_info("sockname")[0])
            rendezvous = self._make_rendezvous(peers, store, own_address)
            rendezvous.resources = resources.pop_all()
            return rendezvous

    def _join(self, thread: NetworkThread, connection: PeerConnection, address: str) -> Peers:
        """Asks the server to admit this launcher.

        Args:
            thread: the thread in which the connection runs.
            connection: the connection to the server.
            address: the address of the server, for the error.

        Returns:
            The table of all nodes.

        Raises:
            JoinError: the server refuses this launcher.
            MasterUnreachableError: the connection ended.
        """
        try:
            return thread.run(join_server(connection, self._own))
        except (OSError, EOFError, ValueError):
            raise network.unreachable_error(
                SERVER, self._endpoint, network.CONNECTION_CUT, address=address
            ) from None

    def _connect_to_store(self, forwarder_port: int) -> TCPStore:
        """Creates a client of the server's store, which is reached through the forwarder.

        Args:
            forwarder_port: the port on loopback at which the forwarder listens.

        Raises:
            MasterUnreachableError: the connection to the server ended.
        """
        try:
            return TCPStore(
                LOOPBACK,
                forwarder_port,
                is_master=False,
                wait_for_workers=False,
                timeout=store_timeout(self._parameters),
            )
        except RuntimeError:
            raise network.unreachable_error(
                SERVER, self._endpoint, network.CONNECTION_CUT
            ) from None

    def _start_forwarder(
        self, thread: NetworkThread, address: str, resources: ExitStack
    ) -> tuple[Forwarder, int]:
        """Starts the forwarder, through which the ranks of this machine reach the store.

        Args:
            thread: the thread in which the forwarder runs.
            address: the address of the server.
            resources: stack that closes the forwarder when the run ends.

        Returns:
            The forwarder, and the port on loopback at which it listens.
        """
        forwarder = Forwarder(address, self._endpoint.port, self._token)
        listener = network.listening_socket(LOOPBACK, 0)
        thread.run(forwarder.listen(listener))
        resources.callback(lambda: thread.run(forwarder.close()))
        return forwarder, int(listener.getsockname()[1])

    def _authenticate(self, thread: NetworkThread, timeout: float) -> tuple[str, auth.Streams]:
        """Connects to the server's auth proxy, trying all of its addresses again until the timeout.

        Args:
            thread: the network thread.
            timeout: how long to try, in seconds.

        Returns:
            The address at which the proxy was reached, and the connection.
        """
        endpoint = self._endpoint
        started = time.monotonic()
        announcer = WaitAnnouncer(self._say)
        while True:
            # If all addresses fail, the last one and the reason for its failure decide what to do.
            address, reason, streams = self._try_addresses(thread)
            if streams is not None:
                return address, streams

            if reason == auth.TOKEN_DIFFERS:
                raise self._token_differs_error()

            waited_s = time.monotonic() - started
            if reason == auth.NOT_A_LAUNCHER:
                # Another program listens there. It may be about to end, so we wait, but not as long
                # as for a server that has not come yet.
                if waited_s > min(timeout, WRONG_SERVICE_TIMEOUT_S):
                    raise network.unreachable_error(SERVER, endpoint, reason, address=address)
            elif waited_s > timeout:
                raise network.unreachable_error(
                    SERVER, endpoint, reason, address=address, tried=timeout
                )

            announcer.say_waiting(f"the node that serves at {endpoint}: {reason}")
            time.sleep(RETRY_INTERVAL_S)

    def _token_differs_error(self) -> TokenDiffersError:
        return TokenDiffersError(
            f"the run at {self._endpoint}, with the token of {self._token.source}",
            "the token differs: the serving node has another one",
            f"set {TOKEN_VARIABLE} to the same text on all machines (`openssl rand -hex "
            "16` makes one), or copy the token file of one machine to the others",
        )

    def _try_addresses(self, thread: NetworkThread) -> tuple[str, str, auth.Streams | None]:
        """Tries once to reach the server's auth proxy at each address of the endpoint.

        Returns:
            The address that was tried last; why it failed, one of the texts of `auth` and
            `network`; and the connection, or None if all addresses have failed.
        """
        address = ""
        reason = network.UNRESOLVED  # stays if the name of the endpoint has no address
        for address in self._endpoint.addresses():
            connecting = authenticate(address, self._endpoint.port, self._token, auth.TO_LAUNCHER)
            try:
                return address, "", thread.run(connecting)
            except ConnectionFailed as error:
                reason = str(error)
        return address, reason, None

    def _make_rendezvous(self, peers: Peers, store: TCPStore, address: str) -> Rendezvous:
        """Creates the rendezvous.

        Args:
            peers: the table of the nodes.
            store: the server's store, or a client of it.
            address: the address of this machine on its connection to the other nodes.
        """
        interface = network.interface_of(self._address_by_flag() or address)
        is_static = self._parameters.backend == "static"
        rendezvous_type = StaticRendezvous if is_static else DynamicRendezvous
        return rendezvous_type(self._parameters, peers, store, self._say, interface)

    def _address_by_flag(self) -> str | None:
        """Returns the address of this machine that --local-addr names.

        It is the address at which the others reach this machine, and so says which interface the
        ranks use.

        Returns:
            None without the flag, or if what it names does not belong to this machine.
        """
        if self._parameters.local_addr:
            for local_address in network.resolve(self._parameters.local_addr):
                if network.is_here(local_address):
                    return local_address
        return None


def _send_changes_by_server(thread: NetworkThread, server: PeerServer, peers: Peers) -> None:
    """Sets `peers.send`, which is called when this launcher, the server's, changes its own node.

    Args:
        thread: the thread in which the server runs.
        server: the server.
        peers: the table of the nodes.
    """

    def send_changes(changes: Mapping[str, Any], to: int | None) -> None:
        """Sends changes to the launcher with the number `to`, or to all launchers if it is None.

        It does not wait until they are sent.
        """
        thread.call_soon(lambda: server.send(changes, of_node=SERVER_NUMBER, to=to))

    peers.send = send_changes


def _start_exchanging_changes(
    thread: NetworkThread, connection: PeerConnection, peers: Peers, forwarder: Forwarder
) -> None:
    """Keeps the table of the nodes equal to the server's table, until the connection ends.

    From now on, changes that this launcher makes to its own node, such as `{"requested_round": 2}`,
    are sent to the server, and changes of other nodes are received from it.

    Args:
        thread: the thread in which the connection runs.
        connection: the connection to the server.
        peers: this launcher's table of the nodes.
        forwarder: carries connections to the server's store. It is aborted when the server is gone,
            so that nobody waits for its store.
    """

    def send_changes(changes: Mapping[str, Any], to: int | None) -> None:
        """Sends changes of the own node to the server, which passes them on.

        They go to the launcher with the number `to`, or to all launchers if it is None.
        """
        thread.call_soon(lambda: connection.send({"changes": changes, "to": to}))

    peers.send = send_changes
    thread.submit(receive_changes(connection, peers, on_loss=forwarder.abort))  # does not wait


def _is_this_machine(host: str) -> bool:
    return any(network.is_here(address) for address in network.resolve(host))
