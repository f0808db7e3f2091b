"""The trained model as an app on Flyte: `podium serve` with a GPU, down to no replica while nobody asks.

    podium export runs/mine my-model --merge
    python examples/flyte/serve.py my-model

Clients speak OpenAI's protocol and send the token that the Flyte secret `podium-token` holds.
"""

import sys

import flyte
from flyte.app import AppEnvironment, Parameter, Scaling
from flyte.io import Dir

MODEL = "/srv/model"
COMMAND = f'umask 077; printf %s "$PODIUM_TOKEN" > /tmp/token; exec podium serve {MODEL} --host 0.0.0.0 --port 8080'

app = AppEnvironment(
    name="podium-model",
    image=flyte.Image.from_debian_base(name="podium-serve").with_pip_packages("podium-rl[server]"),
    resources=flyte.Resources(cpu=4, memory="16Gi", gpu=1),
    secrets=flyte.Secret(key="podium-token", as_env_var="PODIUM_TOKEN"),
    args=["sh", "-c", f"{COMMAND} --token-file /tmp/token"],
    port=8080,
    parameters=[Parameter(name="model", type="directory", mount=MODEL)],
    scaling=Scaling(replicas=(0, 2)),
)

if __name__ == "__main__":
    flyte.init_from_config()
    model = Dir.from_local_sync(sys.argv[1])
    print(flyte.with_servecontext(parameter_values={app.name: {"model": model}}).serve(app).url)
