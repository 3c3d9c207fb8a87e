# Image with lit_attn and its command line:
#
#   docker build -t lit_attn .
#   docker run --rm --init --user "$(id -u):$(id -g)" --gpus all --shm-size 8g -v "$PWD:/work" lit_attn run digits
#
# Results are written to the mounted folder, as files of yours. Without a GPU leave out `--gpus all`.
# A test builds it where Docker or Podman works. The tag of the base image can move; for an image that is the same for
# ever, add the digest that `docker buildx imagetools inspect python:3.11-slim` prints.
FROM python:3.11-slim

# `training.compile` compiles C++ code when a cell starts, and mmsegmentation's OpenCV loads libGL.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libgl1 libglib2.0-0 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/lit_attn
COPY pyproject.toml constraints.txt README.md AGENTS.md LICENSE ablations.yaml ./
COPY experiments experiments
COPY lit_attn lit_attn
RUN pip install --no-cache-dir ".[completion,fla,segmentation,slurm,text,trackers,transformers]" -c constraints.txt

# `--user` names a user that the image does not know: caches need a folder, and libraries a name.
ENV HOME=/tmp USER=lit_attn
WORKDIR /work
ENTRYPOINT ["lit-attn"]
CMD ["--help"]
