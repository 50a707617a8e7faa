# The trainer.
ARG BASE_IMAGE=swerve/python-base:1

FROM ${BASE_IMAGE} AS packages
COPY constraints.txt pyproject.toml /build/
COPY infra/setup /build/infra/setup
COPY infra/docker /build/infra/docker
RUN sh /build/infra/docker/install.sh base,trainer

FROM ${BASE_IMAGE}
COPY --from=packages /opt/swerve /opt/swerve
ENV PATH=/opt/swerve/bin:$PATH PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
WORKDIR /app
COPY pipeline pipeline
COPY trainer trainer
ENTRYPOINT ["python", "-m", "trainer.run"]
