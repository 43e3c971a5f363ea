# docker build -t alfx . && docker run --rm -v "$PWD/runs:/runs" alfx train ppo_cart_pole --root_dir /runs/ppo_cart_pole
FROM python:3.12-slim

# g++ compiles updates (TrainerConfig.compile)
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /alfx
# Change the index for another build of torch, such as https://download.pytorch.org/whl/cu130
RUN pip install --no-cache-dir "torch==2.13.*" --index-url https://download.pytorch.org/whl/cpu
COPY . .
RUN pip install --no-cache-dir ".[all]"

WORKDIR /runs
ENTRYPOINT ["alfx"]
