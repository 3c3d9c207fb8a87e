# Image with lit_attn and its command line:
#
#   docker build -t lit_attn .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" lit_attn run digits
#
# Results are written to the mounted folder. Without a GPU leave out `--gpus all`.
FROM python:3.11-slim

# `training.compile` compiles C++ code when a cell starts.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/lit_attn
COPY pyproject.toml constraints.txt README.md LICENSE ablations.yaml ./
COPY experiments experiments
COPY lit_attn lit_attn
RUN pip install --no-cache-dir ".[completion,slurm,text]" -c constraints.txt

WORKDIR /work
ENTRYPOINT ["lit-attn"]
CMD ["--help"]
