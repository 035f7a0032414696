"""Every message that crosses a process boundary, in the order in which a request meets them.

Read by every process; imports nothing but the standard library. ``codec.py`` turns these classes into
ZMQ frames and back. A message is one frozen dataclass: its fields go into a small msgpack header, in order;
the field ``frames``, where there is one, holds the raw payload frames that follow the header (bodies, token
ids as little-endian uint32, finished bytes). Which frames a message carries is said in its docstring.

Tags are explicit (``TAGS`` at the end). A field may be added at the end with a default; any other change
raises ``WIRE_VERSION``, which every ``Hello`` states.

A *choice* of a request is one completion: with ``n`` choices for each of its prompts, choice ``i * n + j`` is
the j-th completion of prompt i. An *attempt* counts the tries that the router made for a request: whoever
sees a lower attempt than it knows discards the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

WIRE_VERSION = 1

Buffer = Any  # bytes, memoryview or zmq.Frame: anything ZMQ can send and len() can measure
Frames = Sequence[Buffer]

ALL_CHOICES = -1


class Role(IntEnum):
    """Kind of process; also the first part of its identity (``router.0.1``)."""

    API = 1
    ROUTER = 2
    TOKENIZER = 3
    DETOKENIZER = 4
    ENGINE = 5

    @property
    def label(self) -> str:
        """Name for identities, process titles, logs and metric labels."""
        return self.name.lower()


class Route(IntEnum):
    """What a client asked for: decided from the request line alone."""

    COMPLETIONS = 1
    CHAT_COMPLETIONS = 2
    TOKENIZE = 3
    DETOKENIZE = 4
    GENERATE = 5
    MESSAGES = 6
    COUNT_TOKENS = 7  # of such a body
    RESPONSES = 8


class FinishReason(IntEnum):
    """Why a choice ended; RUNNING says that it has not."""

    RUNNING = 0
    STOP = 1  # end-of-sequence token, stop token or stop string
    LENGTH = 2  # max_tokens or the context length
    ABORT = 3  # nobody wants it any more
    ERROR = 4  # the engine could not go on
    GUIDE_FAILED = 5  # it could not go on with the request's guide, for whose sake alone the choice ends


class ReadyFlags(IntEnum):
    """Bits of a row of ready bytes."""

    NONE = 0
    STREAM = 1  # the response is server-sent events (meaningful where a status opens the response)
    LAST = 2  # the response is complete with these bytes
    STOPPED = 4  # a stop string ended the choice: the engine does not know yet (Progress only)


# --- parts of messages ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can take, published in its hello and checked by the tokenizer workers."""

    max_model_len: int = 0  # prompt and output tokens of one sequence
    vocab_size: int = 0  # ids 0 .. vocab_size-1 exist in the embedding
    kv_cache_tokens: int = 0  # tokens that the KV cache holds in all
    eos_token_ids: tuple[int, ...] = ()
    max_num_seqs: int = 0  # sequences that run at once


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the engine picks tokens, the same for every choice of a request. Validated before it is sent.

    The noise of a choice is a function of (seed, choice, position) alone.
    """

    n: int = 1  # choices per prompt
    max_tokens: int = 16  # output tokens per choice; fewer where its prompt leaves less of max_model_len
    min_tokens: int = 0  # eos and stop tokens are not sampled before
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # 1 is off
    seed: int = 0  # 0 .. 2**63-1; always set, drawn by the tokenizer worker where the client gave none
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias_ids: tuple[int, ...] = ()
    logit_bias_values: tuple[float, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    num_logprobs: int = -1  # -1: none; 0: of the sampled token; N: and of the N most likely
    num_prompt_logprobs: int = -1
    guide_kind: str = ""  # "", "json_schema", "regex", "grammar", "choice"
    guide: str = ""
    priority: int = 0  # lower runs first


@dataclass(frozen=True, slots=True)
class Peer:
    """A living process as the supervisor's topology shows it."""

    identity: str  # role.slot.incarnation, never reused
    role: int
    endpoints: tuple[str, ...]  # router: (api, workers); engine: (generate,); detokenizer: (outputs,)
    limits: EngineLimits  # engines alone; else zeros


@dataclass(frozen=True, slots=True)
class Metric:
    """The value of one metric in one process; its type and buckets are in ``runtime/metrics.py``."""

    name: str
    labels: str  # 'reason="stop"', or ''
    values: tuple[float, ...]  # counter, gauge: one; histogram: buckets..., sum


# --- API process -> router ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """A request begins. Frames: the first pieces of the raw body, of at most 64 KiB each."""

    request_id: str  # made by the API process: '<its identity>:<counter>'
    route: int
    content_length: int  # -1: not stated (chunked upload)
    complete: bool  # no more body follows
    session: str = ""  # the client's name for a conversation: it stays with one engine, whose cache knows its beginning
    frames: Frames = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class BodyChunk:
    """More of a raw body. Frames: pieces of at most 64 KiB each."""

    request_id: str
    complete: bool
    frames: Frames = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop working for a request or for one of its choices (api -> router, router -> any worker).

    A detokenizer gets it for an attempt that was given up; of one that is cancelled the engine tells it the end.
    """

    request_id: str
    attempt: int = 0  # 0 from the API process, which knows of no attempts
    choice: int = ALL_CHOICES


# --- router -> tokenizer worker -> router ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Turn a raw body into token ids. Frames: the body in the pieces in which it arrived."""

    request_id: str
    attempt: int
    route: int
    engine: str  # identity of the engine to which the ids go
    detokenizer: str  # identity of the detokenizer to which the engine answers
    frames: Frames = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is valid and its token ids are on their way to the engine.

    Frames: those of the Generate that was sent (sampling, context, one of prompt ids for each prompt): the
    router's journal keeps them, to start the request again if a worker dies.
    """

    request_id: str
    attempt: int
    stream: bool  # the response is server-sent events: its headers can go out now
    num_choices: int
    num_prompt_tokens: int
    frames: Frames = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request is invalid, or unwanted by now. Frames: the finished error body."""

    request_id: str
    attempt: int
    status: int  # HTTP status; 499 where the client had gone
    frames: Frames = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Answered:
    """The request needed no engine. Frames: the finished JSON body."""

    request_id: str
    attempt: int
    frames: Frames = field(default=(), compare=False)


# --- tokenizer worker (or, after a death, the router) -> engine -----------------------------------------------


@dataclass(frozen=True, slots=True)
class Generate:
    """The one message that starts work in the engine.

    Frames: sampling (see ``codec.encode_part``), context (opaque to the engine), then the ids of each prompt,
    then, where ``num_delivered`` is not empty, the output ids that each choice has already produced, then, with
    ``has_notes``, the notes of each choice (see Progress).
    """

    request_id: str
    attempt: int
    detokenizer: str  # identity of the detokenizer that gets the output
    num_prompts: int
    num_delivered: tuple[int, ...] = ()  # per choice: output tokens whose text the client has; () at first
    finished: tuple[int, ...] = ()  # per choice: FinishReason of those that ended in an earlier attempt
    has_notes: bool = False
    frames: Frames = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Undelivered:
    """The sender could not hand these requests on (their peer is unknown or full): begin them anew."""

    request_ids: tuple[str, ...]
    attempts: tuple[int, ...]


# --- engine -> detokenizer worker -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Opens a request at a detokenizer; precedes its output on the same ordered channel.

    Frames: context, then the output ids of each choice from earlier attempts (none at first), then, with
    ``has_notes``, the notes of each choice.
    """

    request_id: str
    attempt: int
    engine: str  # identity of the sender: should it die, the request goes on elsewhere
    num_delivered: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    has_notes: bool = False
    frames: Frames = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The logprobs of a choice's prompt, where asked for; precedes its first output on the same channel.

    Frames: two, as in EngineOutputs, with a row for each prompt token but the first.
    """

    request_id: str
    attempt: int
    choice: int
    num_top: int
    frames: Frames = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class EngineOutputs:
    """One engine step's tokens for one detokenizer, a row for each choice that moved.

    Frames: all new token ids, row after row. Where a row has logprobs (num_top >= 0), two more frames hold,
    row after row and token after token, 1 + num_top entries, the sampled token first: uint32 ids, float32
    natural logarithms.
    """

    request_ids: tuple[str, ...]
    attempts: tuple[int, ...]
    choices: tuple[int, ...]
    num_tokens: tuple[int, ...]
    finish_reasons: tuple[int, ...]
    num_top: tuple[int, ...] = ()  # empty: no row has logprobs; -1: this row has none
    num_cached_tokens: tuple[int, ...] = ()  # empty: zeros; prompt tokens found in the prefix cache
    frames: Frames = field(default=(), compare=False)


# --- detokenizer worker -> router -> API process --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """What a detokenizer made of one EngineOutputs for the requests of one API process.

    Frames: the token ids consumed, row after row (for the journal), and the ready bytes, row after row. Where a
    row has a note, a third frame holds the notes, row after row: bytes that nobody but a detokenizer reads, which
    the journal keeps beside the ids since they cannot be had from them again (logprobs).
    """

    request_ids: tuple[str, ...]
    attempts: tuple[int, ...]
    choices: tuple[int, ...]
    num_tokens: tuple[int, ...]  # output tokens consumed by this row
    finish_reasons: tuple[int, ...]
    statuses: tuple[int, ...]  # HTTP status where these bytes open a plain response, else 0
    flags: tuple[int, ...]  # ReadyFlags
    num_bytes: tuple[int, ...]
    num_note_bytes: tuple[int, ...] = ()  # empty: no row has a note
    frames: Frames = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class ReadyBytes:
    """Bytes for clients, a row for each response. Frames: one, the bytes, row after row."""

    request_ids: tuple[str, ...]
    statuses: tuple[int, ...]  # not 0: opens the response with this HTTP status
    flags: tuple[int, ...]  # ReadyFlags
    num_bytes: tuple[int, ...]
    frames: Frames = field(default=(), compare=False)


# --- every process <-> supervisor; Hello also worker -> router ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """I am ready. To the supervisor first, then, once the topology names a router, to the router."""

    identity: str
    role: int
    wire_version: int
    pid: int
    capacity: int = 0  # tokenizer workers: short bodies in flight
    endpoints: tuple[str, ...] = ()
    limits: EngineLimits = EngineLimits()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I am alive: my loop has turned ``progress`` times (the engine counts steps too)."""

    progress: int
    unfinished: int  # requests that this process holds
    topology_version: int  # of the last topology that it knows
    draining: bool  # it refuses what is new
    metrics: tuple[Metric, ...]
    doing: str = ""  # before its hello: what its start is busy with, for people


@dataclass(frozen=True, slots=True)
class Topology:
    """All ready processes. A peer that is missing is dead: close its sockets, its messages are lost."""

    version: int  # grows with every change
    peers: tuple[Peer, ...]
    left: tuple[str, ...] = ()  # who has left in peace since the version before: no request is to blame


@dataclass(frozen=True, slots=True)
class Publish:
    """A page for the API processes to serve as it is. Frames: its body.

    A page that is not renewed within ``max_age_s`` is stale; 0 means never.
    """

    path: str
    status: int
    content_type: str
    max_age_s: float
    frames: Frames = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave: ``drain`` finishes what is running and refuses what is new, without it the process ends now."""

    drain: bool


Message = (
    Submit
    | BodyChunk
    | Abort
    | Prepare
    | Accepted
    | Rejected
    | Answered
    | Generate
    | Undelivered
    | Begin
    | PromptLogprobs
    | EngineOutputs
    | Progress
    | ReadyBytes
    | Hello
    | Heartbeat
    | Topology
    | Publish
    | Stop
)

TAGS: dict[int, type[Message]] = {
    1: Submit,
    2: BodyChunk,
    3: Abort,
    10: Prepare,
    11: Accepted,
    12: Rejected,
    13: Answered,
    20: Generate,
    21: Undelivered,
    30: Begin,
    31: EngineOutputs,
    32: PromptLogprobs,
    40: Progress,
    41: ReadyBytes,
    50: Hello,
    51: Heartbeat,
    52: Topology,
    53: Publish,
    54: Stop,
}
