# Learner: torch for CUDA or the CPU.
# docker build -f deploy/docker/learner.Dockerfile --build-arg DIGEST=sha256:… --build-arg CUDA=true --build-arg TORCH_INDEX=… -t penstock-learner:0.1.0 .
# DIGEST: of python:3.11-slim-bookworm, as `docker buildx imagetools inspect` shows it.
ARG DIGEST
FROM python:3.11-slim-bookworm@${DIGEST} AS build
# Where pip finds the build of torch; empty: where it finds everything.
ARG TORCH_INDEX=""
# Extras of penstock that the environments need, such as box2d,mujoco.
ARG EXTRAS=""
# true: torch must be a CUDA build, false: it must not.
ARG CUDA="false"
WORKDIR /build
COPY constraints.txt pyproject.toml LICENSE README.md ./
COPY actor actor
COPY broker broker
COPY learner learner
COPY penstock penstock
RUN python -m venv /opt/penstock \
 && /opt/penstock/bin/pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[learner,postgresql${EXTRAS:+,$EXTRAS}]" \
 && FOUND="$(/opt/penstock/bin/python -c "import torch; print(str(torch.version.cuda is not None).lower())")" \
 && { test "$FOUND" = "$CUDA" || { echo "CUDA=$CUDA, but torch has CUDA: $FOUND; name another TORCH_INDEX" >&2; exit 1; }; }

FROM python:3.11-slim-bookworm@${DIGEST}
COPY --from=build /opt/penstock /opt/penstock
# Everything that is written lies on a volume or in /tmp: the root may be read-only.
ENV PATH=/opt/penstock/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
EXPOSE 9464
ENTRYPOINT ["penstock"]
CMD ["learner", "--help"]
