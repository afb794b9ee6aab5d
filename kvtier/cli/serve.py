"""`kvtier serve`: a model behind the HTTP interface of OpenAI."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import logging
import math
import re
import socket
import sys
from pathlib import Path
from typing import Any

from kvtier.cli.arguments import names_and_values, positive
from kvtier.cli.chat.command import check_budgets
from kvtier.cli.config import read_config
from kvtier.config import parse_bytes
from kvtier.errors import ConfigError
from kvtier.serving.http.requests.keys import read_keys

_EXAMPLES = """\
examples:
  kvtier serve Qwen/Qwen3-0.6B                                    # http://127.0.0.1:8000/v1
  kvtier serve Qwen/Qwen3-0.6B --store sessions --session-ttl 1d  # sessions outlive the process
  kvtier serve Qwen/Qwen3-0.6B --device-budget 8GiB --host-budget 64GiB --disk-budget 500GiB --store sessions
  kvtier serve Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key-file keys # lines: NAME KEY

Any client of OpenAI's interface talks to it: chat completions, completions, responses, models. /health and /metrics
are for those who run it. Ctrl-C and SIGTERM let requests finish, save what is kept, and end it.
"""

_PACKAGES = ("fastapi", "uvicorn", "openai")
_USUAL_PORTS = {"http": ":80", "https": ":443"}
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's interface",
        description="Serve a model to many clients at a time. What prompts have in common is computed once, sessions "
        "keep their state, and keys and values go to host memory and to the disk where the device has no room.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the model hub")
    _add_interface(parser)
    _add_memory(parser)
    _add_requests(parser)
    parser.set_defaults(run=run)


def _add_interface(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("interface")
    group.add_argument(
        "--host", type=_host, default="127.0.0.1", help="address to listen at (127.0.0.1: this machine alone)"
    )
    group.add_argument("--port", type=_port, default=8000, help="(8000); 0: any that is free")
    group.add_argument(
        "--served-model-name", type=_text, metavar="NAME", help="of the model, for clients (MODEL as it is written)"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="lines NAME KEY: only these may ask, and share nothing")
    group.add_argument(
        "--allowed-origin",
        type=_origin,
        action="append",
        default=[],
        metavar="URL",
        help="a page of which browsers may ask, such as http://localhost:3000; once for each, or * for all (none)",
    )
    group.add_argument("--chat-template", metavar="FILE", help="instead of the model's own")
    group.add_argument(
        "--default-chat-template-kwargs",
        type=names_and_values,
        metavar="JSON",
        default={},
        help="what the template reads besides messages, such as '{\"enable_thinking\": false}'; a request may say "
        "otherwise in chat_template_kwargs",
    )
    group.add_argument(
        "--session-ttl",
        type=_seconds,
        default=math.inf,
        metavar="TIME",
        help="forget sessions unused for so long, such as 30m, 12h, 7d (never)",
    )
    group.add_argument(
        "--max-sessions",
        type=positive,
        metavar="N",
        default=10_000,
        help="that are known; the longest unused goes first (10000)",
    )
    group.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="TIME",
        help="what requests may take to finish at the end (30s)",
    )
    group.add_argument(
        "--client-timeout",
        type=_seconds,
        default=60.0,
        metavar="TIME",
        help="what a client may take to send its request, and to read a part of its answer (60s)",
    )
    group.add_argument("--max-body", default="16MiB", metavar="SIZE", help="of a request (16MiB)")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and memory")
    group.add_argument("--device", help="such as cuda:1 or cpu (a GPU, if there is one)")
    group.add_argument(
        "--dtype", help="of weights, keys and values, such as bfloat16 (what the model is saved in; on the CPU float32)"
    )
    group.add_argument(
        "--device-budget", metavar="SIZE", help="device memory for keys and values, such as 4GiB (what there is)"
    )
    group.add_argument("--host-budget", metavar="SIZE", help="host memory for them, such as 64GiB (what there is)")
    group.add_argument("--store", metavar="DIR", help="where they are saved; without it they end with the process")
    group.add_argument("--disk-budget", metavar="SIZE", help="bytes of the store, such as 500GiB (no limit)")
    group.add_argument("--block-size", type=positive, metavar="N", default=64, help="tokens of a block (64)")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--max-model-len", type=positive, metavar="N", help="tokens of a prompt and its answer (the model's own)"
    )
    group.add_argument(
        "--default-max-tokens",
        type=positive,
        metavar="N",
        default=1024,
        help="of a chat's answer that names no limit (1024)",
    )
    group.add_argument(
        "--max-batch-tokens", type=positive, metavar="N", default=2048, help="computed in one step (2048)"
    )
    group.add_argument(
        "--max-running", type=positive, metavar="N", default=256, help="requests that are computed at a time (256)"
    )
    group.add_argument(
        "--max-waiting", type=positive, metavar="N", default=1024, help="requests that wait; more get a 429 (1024)"
    )
    group.add_argument("--scheduler", choices=("fair", "fcfs"), default="fair", help="who goes next (fair)")


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns the exit status."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"kvtier serve needs {', '.join(missing)}: pip install 'kvtier[serve]'.")
    check_budgets(args)
    parse_bytes("--max-body", args.max_body)
    if args.disk_budget is not None and args.store is None:
        raise ConfigError("--disk-budget is of a store: give --store DIR.")
    if args.served_model_name == "":
        raise ConfigError("--served-model-name: give a name that is not empty.")
    # What is wrong is said before weights are read, which takes minutes. It may be a pipe, which is read once.
    keys = {} if args.api_key_file is None else read_keys(args.api_key_file)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("kvtier").setLevel(logging.INFO)
    from kvtier.conversation.disk.files.folder import Folder
    from kvtier.conversation.given.prompts import Prompts
    from kvtier.hf.models.checkpoint.loading import model_of, quiet, tokenizer_of

    with quiet():
        read_config(args.model, loaded=True)  # its errors say what is not there
        tokenizer = tokenizer_of(args.model)
        if args.chat_template is not None:
            _use_template(tokenizer, args.chat_template)
        Prompts(tokenizer, None, args.default_chat_template_kwargs, any_tools=True)
        if args.store is not None:
            Folder(args.store).close()  # the same
        from kvtier.serving.http.server import Server

        with _listening(args.host, args.port) as listening:  # the same
            model = model_of(args.model, args.dtype, args.device)
            with Server(model, tokenizer, _options(args, keys)) as server:
                host, port = listening.getsockname()[:2]
                _warn(args, tokenizer)
                server.run(listening, lambda: _say(f"serving {args.model} at http://{_shown(host)}:{port}/v1"))
                _say("saving what is kept")
    return 0


def _use_template(tokenizer: Any, file: str) -> None:
    """Write messages as a file says. Raises ConfigError: it is no text, or no template."""
    from jinja2 import TemplateSyntaxError

    try:
        tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello."}], tokenize=False)
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {file} is no text: {error}.") from error
    except TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template {file}, line {error.lineno}: {error.message}") from error
    except OSError:
        raise
    except Exception as error:  # that it refuses this message says nothing of others
        logging.getLogger(__name__).debug("the chat template refuses a message: %s", error)


def _options(args: argparse.Namespace, keys: dict[str, str]) -> Any:
    from kvtier.serving.http.server import ServerOptions

    store = {
        "device_budget": args.device_budget,
        "host_budget": args.host_budget,
        "disk_budget": args.disk_budget,
        "block_size": args.block_size,
    }
    engine = {name: getattr(args, name) for name in ("max_batch_tokens", "max_running", "max_waiting", "scheduler")}
    return ServerOptions(
        name=args.served_model_name or args.model,
        directory=args.store,
        store=store,
        engine=engine,
        keys=keys,
        context=args.max_model_len,
        default_tokens=args.default_max_tokens,
        ttl=args.session_ttl,
        sessions=args.max_sessions,
        max_body=parse_bytes("--max-body", args.max_body),
        timeout=args.client_timeout,
        drain=args.drain_timeout,
        origins=tuple(args.allowed_origin),
        template=args.default_chat_template_kwargs,
    )


def _warn(args: argparse.Namespace, tokenizer: Any) -> None:
    """Say what somebody may not expect."""
    from kvtier.hf.models.checkpoint.templates import makes_prompts

    if not makes_prompts(tokenizer):
        _say(f"{args.model} has no chat template: contents of messages are joined. --chat-template FILE gives one.")
    if args.api_key_file is None and args.host not in ("127.0.0.1", "localhost", "::1"):
        _say(f"Whoever reaches {args.host} may ask, and all share what is kept. --api-key-file FILE says who may.")
    if args.api_key_file is None and "*" in args.allowed_origin:
        _say("Any page that a browser here shows may ask. --allowed-origin URL or --api-key-file FILE says which may.")


def _say(text: str) -> None:
    print(f"kvtier: {text}", file=sys.stderr, flush=True)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _listening(host: str, port: int) -> socket.socket:
    from kvtier.serving.http.server import bind

    try:
        return bind(host, port)
    except TypeError as error:  # so Python says that a name cannot be looked up, as one that is too long
        raise ConfigError(f"--host {host}: it is no address, nor the name of one.") from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}.") from error
        raise ConfigError(
            f"Port {port} of {host} is in use. Give another --port, or 0 for any that is free."
        ) from error


def _text(text: str) -> str:
    """What is looked up, or sent to clients: not the bytes that a file's name may have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no text") from None
    return text


def _host(text: str) -> str:
    if not text:  # as of a variable that is not set: it would be all addresses
        raise argparse.ArgumentTypeError("it is empty; 0.0.0.0 is all addresses")
    return _text(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, 0 to 65535")
    return int(text)


def _origin(text: str) -> str:
    """As a browser names it, without the port of its scheme. One that ends in a slash, say, is that of no page."""
    if text not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://(?!:)[^/?#@*\sA-Z]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no origin, such as http://localhost:3000, nor *")
    return text.removesuffix(_USUAL_PORTS.get(text.partition(":")[0], ""))


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1:]) if text[-1:] in _UNITS else (text, "s")
    try:
        found = float(number) * _UNITS[unit]
    except ValueError:
        found = -1.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time, such as 90s, 30m, 12h or 7d")
    return found
