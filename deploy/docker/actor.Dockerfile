# Rollout and evaluation actors: torch for the CPU.
# docker build -f deploy/docker/actor.Dockerfile --build-arg DIGEST=sha256:… --build-arg TORCH_INDEX=… -t penstock-actor:0.1.0 .
# DIGEST: of python:3.11-slim-bookworm, as `docker buildx imagetools inspect` shows it.
ARG DIGEST
FROM python:3.11-slim-bookworm@${DIGEST} AS build
# Where pip finds the build of torch; empty: where it finds everything.
ARG TORCH_INDEX=""
# Extras of penstock that the environments need, such as box2d,mujoco.
ARG EXTRAS=""
WORKDIR /build
COPY constraints.txt pyproject.toml LICENSE README.md ./
COPY actor actor
COPY broker broker
COPY learner learner
COPY penstock penstock
RUN python -m venv /opt/penstock \
 && /opt/penstock/bin/pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[actor${EXTRAS:+,$EXTRAS}]" \
 && /opt/penstock/bin/python -c "import torch, sys; sys.exit(torch.version.cuda and 'TORCH_INDEX: name an index with CPU builds of torch')"

FROM python:3.11-slim-bookworm@${DIGEST}
COPY --from=build /opt/penstock /opt/penstock
# Everything that is written lies on a volume or in /tmp: the root may be read-only.
ENV PATH=/opt/penstock/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
EXPOSE 9464
ENTRYPOINT ["penstock"]
CMD ["actor", "--help"]
