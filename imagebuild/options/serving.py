"""`weights`, `bench`, `ship`, `doctor` and `render`."""

from __future__ import annotations

from imagebuild.config import CLUSTERS
from imagebuild.options.common import Verbs, count, counts, group, positive, verb


def weights(verbs: Verbs) -> None:
    """`weights`."""
    weights = group(verbs, "weights", "checkpoints on local disk")
    fetch = verb(weights, "fetch", "commands.weights:fetch",
                  "fetch a checkpoint; what is there and right is kept")  # fmt: skip
    fetch.add_argument("source", metavar="SOURCE",
                       help="OWNER/NAME on the model hub, an http address with SHA256SUMS, "
                       "or a folder")  # fmt: skip
    fetch.add_argument("--to", metavar="DIR", required=True, help="where the files go")
    fetch.add_argument("--revision", metavar="R", default="main", help="of the hub; default: main")
    fetch.add_argument("--accept-licence", metavar="NAME",
                       help="of weights whose licence restricts their use")  # fmt: skip
    verify = verb(weights, "verify", "commands.weights:verify", "check a fetched checkpoint")
    verify.add_argument("folder", metavar="DIR")
    verify.add_argument("--quick", action="store_true", help="sizes and headers alone")
    for one in (fetch, verify):
        one.add_argument("--jobs", metavar="N", type=count, default=4,
                         help="files at a time; default: 4")  # fmt: skip


def bench(verbs: Verbs) -> None:
    """`bench`."""
    bench = group(verbs, "bench", "measure what is running")
    serve = verb(bench, "serve", "commands.bench:serve",
                  "speed of an OpenAI server, or of two in turn")  # fmt: skip
    serve.add_argument("url", metavar="URL", help="such as http://127.0.0.1:8002")
    serve.add_argument("--versus", metavar="URL", help="another server, measured in turn with it")
    serve.add_argument("--baseline", metavar="FILE", help="an earlier --output to compare with")
    serve.add_argument("--output", metavar="FILE", help="where the figures go as JSON")
    serve.add_argument("--label", metavar="TEXT", default="", help="kept in --output")
    serve.add_argument("--model", metavar="NAME", help="default: the first one served")
    serve.add_argument("--api-key-file", metavar="FILE", help="default: OPENAI_API_KEY's value")
    serve.add_argument("--concurrency", metavar="N,N", type=counts,
                       default=(1, 2, 4, 8, 16, 32, 64, 128, 256),
                       help="default: 1,2,4,...,256")  # fmt: skip
    for name, default, what in (
        ("--prompt-tokens", 512, "about how long prompts are"),
        ("--output-tokens", 128, "how long answers are"),
        ("--requests", 2, "for each of those at a time"),
        ("--repeats", 5, "of each level, for the median"),
        ("--timeout", 300, "seconds without a byte"),
    ):
        serve.add_argument(name, metavar="N", type=positive, default=default,
                           help=f"{what}; default: {default}")  # fmt: skip


def ship(verbs: Verbs) -> None:
    """`ship`."""
    send = verb(verbs, "ship", "commands.ship:run", "send an image to other machines by ssh")
    send.add_argument("host", metavar="HOST", nargs="+", help="such as box2 or user@10.0.0.2")
    send.add_argument("--image", metavar="NAME:TAG", help="default: what build --arch sm_121 tags")
    send.add_argument("--compress", action="store_true", help="send zstd; pays on slow links")
    send.add_argument("--jobs", metavar="N", type=count, default=2,
                      help="hosts at a time; default: 2")  # fmt: skip


def doctor(verbs: Verbs) -> None:
    """`doctor`."""
    host = verb(verbs, "doctor", "commands.doctor:run", "whether this host can run a deployment")
    host.add_argument("deployment", metavar="DEPLOYMENT", help="such as gb10-2x")
    host.add_argument("--model-dir", metavar="DIR", help="of the checkpoint on this host")
    host.add_argument("--set", metavar="GLM_X=V", action="append", default=[],
                        help="a knob; repeatable")  # fmt: skip
    host.add_argument("--strict", action="store_true", help="exit 1 on warnings")


def render(verbs: Verbs) -> None:
    """`render`."""
    text = "write generated lines of the Dockerfile, or manifests for Kubernetes"
    render = verb(verbs, "render", "commands.render:run", text)
    render.add_argument("what", nargs="?", choices=["dockerfile", "kubernetes"],
                        default="dockerfile", help="default: dockerfile")  # fmt: skip
    more = render.add_argument_group("with kubernetes")
    more.add_argument("--deployment", metavar="NAME", help="such as gb10-4x")
    more.add_argument("--image", metavar="NAME", help="that every rank runs")
    more.add_argument("--model-path", metavar="DIR", help="of the checkpoint on each node")
    more.add_argument("--cache-path", metavar="DIR", default="/var/cache/glm53",
                      help="on each node; default: /var/cache/glm53")  # fmt: skip
    more.add_argument("--drafter-path", metavar="DIR", default="", help="with dflash2")
    more.add_argument("--name", metavar="NAME", default="glm53", help="default: glm53")
    more.add_argument("--namespace", metavar="NAME", default="default", help="default: default")
    more.add_argument("--replicas", metavar="N", type=count, default=1,
                      help="groups of ranks; default: 1")  # fmt: skip
    more.add_argument("--cluster", choices=CLUSTERS, default="none", help="the image's")
    more.add_argument("--set", metavar="GLM_X=V", action="append", default=[],
                      help="a knob; repeatable")  # fmt: skip
    more.add_argument("--node-label", metavar="L=V", action="append", default=[],
                      help="that nodes must have; repeatable")  # fmt: skip
    more.add_argument("--rdma", metavar="RESOURCE", default="rdma/hca_shared_devices_a",
                      help="of the device plugin; default: rdma/hca_shared_devices_a")  # fmt: skip
    more.add_argument("--api-key-secret", metavar="NAME", default="",
                      help="a Secret with the key api-key")  # fmt: skip
    more.add_argument("--output", metavar="FILE", help="default: stdout")
