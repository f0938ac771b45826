# Gateway: no torch. It runs no trainings in this image: those want the learner's packages beside it.
# docker build -f deploy/docker/gateway.Dockerfile --build-arg DIGEST=sha256:… -t penstock-gateway:0.1.0 .
# DIGEST: of python:3.11-slim-bookworm, as `docker buildx imagetools inspect` shows it.
ARG DIGEST
FROM python:3.11-slim-bookworm@${DIGEST} AS build
# More extras of penstock, such as launch.
ARG EXTRAS=""
WORKDIR /build
COPY constraints.txt pyproject.toml LICENSE README.md ./
COPY actor actor
COPY broker broker
COPY learner learner
COPY penstock penstock
RUN python -m venv /opt/penstock \
 && /opt/penstock/bin/pip install --no-cache-dir --constraint constraints.txt ".[gateway,postgresql${EXTRAS:+,$EXTRAS}]"

FROM python:3.11-slim-bookworm@${DIGEST}
COPY --from=build /opt/penstock /opt/penstock
# Everything that is written lies on a volume or in /tmp: the root may be read-only.
ENV PATH=/opt/penstock/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
EXPOSE 8000 9464
ENTRYPOINT ["penstock"]
CMD ["gateway", "--help"]
