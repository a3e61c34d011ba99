# Rendered by `sm12x recipe render --to nomad deepseek-v4-flash-gb10-x2`:
# edit the recipe, not this file.
#
# DeepSeek-V4-Flash, 200K context, 2 x GB10 over RoCE (mp), MTP
# Status: reported.
#
#   nomad job run -var image=IMAGE FILE
#   nomad job run -var image=IMAGE -var gpus=0 -var args=check FILE
#
# The second needs no GPU: it checks the image, and the job ends.
#
# The client block of the agent has, with NVIDIA's device plugin:
#   host_network "private" { cidr = "10.0.0.0/8" }       what servers may bind to
#   host_volume "sm12x-models" { path = "/srv/models" }  of uid 1000, like the next
#   host_volume "sm12x-cache" { path = "/srv/sm12x-cache" }  emptied when the image changes;
#       a folder for each such name: who may write there can run code in the servers that read it
#   max_kill_timeout = "3m"                              or kill_timeout is cut to 30 s
#   host_network "fabric" { cidr = "192.168.100.0/24" }  the link between the machines: an isolated
#                                                        network, as nothing on it asks for a key
#   meta { fabric_interface = "..." fabric_hca = "..." }  its names on this machine
# Secrets are Nomad variables; without api_key the server asks for no key:
#   nomad var put nomad/jobs/deepseek-v4-flash-gb10-x2 api_key=... hf_token=...

variable "image" {
  type        = string
  description = "The image with its full tag; `sm12x bundle` prints that of its own."
}

variable "gpus" {
  type        = number
  description = "GPUs to take on a machine; 0 runs `args` once on a machine without any."
  default     = 1
}

variable "args" {
  type        = string
  description = "What to run in place of the server, such as check; split at blanks."
  default     = ""
}

variable "port" {
  type        = number
  description = "The port of deepseek-v4-flash-gb10-x2."
  default     = 8000
}

variable "host_network" {
  type        = string
  description = "The client's host_network to bind to. Never a public one: requests are not encrypted."
  default     = "private"
}

variable "memory" {
  type        = number
  description = "Host memory in MiB, a hard limit; weights are copied there in sleep."
  default     = 104448
}

variable "cpu" {
  type        = number
  description = "Its share of the CPUs in MHz, as Nomad counts them; a server may use more."
  default     = 2000
}

variable "models_volume" {
  type        = string
  description = "The client's host volume with the models."
  default     = "sm12x-models"
}

variable "cache_volume" {
  type        = string
  description = "The client's host volume for what is compiled when a server starts."
  default     = "sm12x-cache"
}

variable "datacenters" {
  type        = list(string)
  description = "Where the job may run."
  default     = ["*"]
}

variable "fabric" {
  type        = string
  description = "The client's host_network of the link between the machines."
  default     = "fabric"
}

locals {
  rank_0_words = ["deepseek-v4-flash-gb10-x2"]
  rank_0       = var.args == "" ? local.rank_0_words : split(" ", var.args)
  rank_1_words = ["deepseek-v4-flash-gb10-x2", "node_rank=1", "--", "--headless"]
  rank_1       = var.args == "" ? local.rank_1_words : split(" ", var.args)
}

job "deepseek-v4-flash-gb10-x2" {
  # A check ends: it is a batch job, and no job of Nomad's changes from one to the other.
  id          = var.gpus > 0 ? "deepseek-v4-flash-gb10-x2" : "deepseek-v4-flash-gb10-x2-check"
  type        = var.gpus > 0 ? "service" : "batch"
  datacenters = var.datacenters

  # GB10. Its plugin reports no memory to ask for; the host's is the same.
  dynamic "constraint" {
    for_each = var.gpus > 0 ? [1] : []
    content {
      attribute = "${attr.cpu.arch}"
      operator  = "="
      value     = "arm64"
    }
  }

  dynamic "constraint" {
    for_each = var.gpus > 0 ? [1] : []
    content {
      operator = "distinct_hosts"
      value    = "true"
    }
  }

  dynamic "constraint" {
    for_each = var.gpus > 0 ? [1] : []
    content {
      attribute = "${meta.fabric_interface}"
      operator  = "is_set"
    }
  }

  dynamic "constraint" {
    for_each = var.gpus > 0 ? [1] : []
    content {
      attribute = "${meta.fabric_hca}"
      operator  = "is_set"
    }
  }

  group "rank-0" {
    dynamic "update" {
      for_each = var.gpus > 0 ? [1] : []
      content {
        # 20 min to pull the image, 1 x 15 to load, 5 to spare. Fetch the weights before.
        health_check      = "checks"
        min_healthy_time  = "30s"
        healthy_deadline  = "40m"
        progress_deadline = "45m"
        # The new server gets the GPUs of the old: there are none for a canary.
        max_parallel = 1
        auto_revert  = true
      }
    }

    restart {
      # Two more loads fit into the interval; then another machine is tried.
      attempts = var.gpus > 0 ? 2 : 0
      interval = "70m"
      delay    = "30s"
      mode     = "fail"
    }

    dynamic "reschedule" {
      # A check that fails is an answer: it is not tried elsewhere.
      for_each = var.gpus > 0 ? [] : [1]
      content {
        attempts  = 0
        unlimited = false
      }
    }

    network {
      port "http" {
        static       = var.port
        host_network = var.host_network
      }
      port "master" {
        # vLLM's default --master-port.
        static       = 29501
        host_network = var.fabric
      }
    }

    volume "models" {
      type   = "host"
      source = var.models_volume
    }

    volume "cache" {
      type   = "host"
      source = var.cache_volume
    }

    task "vllm" {
      driver = "docker"
      # vLLM ends its requests; unpinning the host copy of the weights takes its time.
      kill_signal  = "SIGTERM"
      kill_timeout = "2m"

      config {
        image              = var.image
        args               = local.rank_0
        image_pull_timeout = "20m"
        # The server binds to one private address of the machine, and NCCL to its links.
        network_mode = "host"
        # Tensor-parallel workers talk through shared memory; docker's default is 64 MiB.
        shm_size     = 17179869184
        cap_drop     = ["all"]
        security_opt = ["no-new-privileges"]
        healthchecks {
          # Nomad's own check, below, is the one that counts.
          disable = true
        }
        # RoCE, which pins what it sends.
        devices = var.gpus > 0 ? [{ host_path = "/dev/infiniband", container_path = "/dev/infiniband" }] : []
        ulimit  = var.gpus > 0 ? [{ memlock = "-1" }] : []
      }

      env {
        SM12X_HOST        = "${NOMAD_IP_http}"
        SM12X_PORT        = "${NOMAD_PORT_http}"
        SM12X_MASTER_ADDR = "${NOMAD_IP_master}"
        # These differ by machine: its `meta` in the client's configuration.
        VLLM_HOST_IP       = "${NOMAD_IP_master}"
        NCCL_SOCKET_IFNAME = "${meta.fabric_interface}"
        GLOO_SOCKET_IFNAME = "${meta.fabric_interface}"
        NCCL_IB_HCA        = "${meta.fabric_hca}"
        # Written below; the Hugging Face client takes an empty file as no token.
        HF_TOKEN_PATH = "${NOMAD_SECRETS_DIR}/hf_token"
      }

      service {
        name     = "deepseek-v4-flash-gb10-x2-master"
        provider = "nomad"
        port     = "master"
      }

      template {
        destination = "${NOMAD_SECRETS_DIR}/hf_token"
        uid         = 1000
        gid         = 1000
        perms       = "0400"
        # A restart would cost a load; a new secret waits for the next one.
        change_mode = "noop"
        data        = <<-EOT
          {{- $path := printf "nomad/jobs/%s" (env "NOMAD_JOB_ID") -}}
          {{- if nomadVarExists $path }}{{ with nomadVar $path -}}
          {{ with .hf_token }}{{ . }}{{ end }}
          {{- end }}{{ end }}
        EOT
      }

      template {
        destination = "${NOMAD_SECRETS_DIR}/api_key"
        env         = true
        uid         = 1000
        gid         = 1000
        perms       = "0400"
        change_mode = "noop"
        data        = <<-EOT
          {{- $path := printf "nomad/jobs/%s" (env "NOMAD_JOB_ID") -}}
          {{- if nomadVarExists $path }}{{ with nomadVar $path -}}
          {{ with .api_key }}VLLM_API_KEY={{ . }}{{ end }}
          {{- end }}{{ end }}
        EOT
      }

      volume_mount {
        volume      = "cache"
        destination = "/cache"
      }

      volume_mount {
        volume      = "models"
        destination = "/cache/huggingface"
      }

      dynamic "service" {
        for_each = var.gpus > 0 ? [1] : []
        content {
          name     = "deepseek-v4-flash-gb10-x2"
          provider = "nomad"
          port     = "http"
          check {
            # The API server answers /health, also while the engine sleeps; a request to a sleeping
            # model has no answer. No check_restart: when the engine dies, vLLM ends by itself, and
            # what is only slow is not dead.
            type     = "http"
            path     = "/health"
            interval = "10s"
            timeout  = "5s"
          }
        }
      }

      resources {
        cpu = var.gpus > 0 ? var.cpu : 1000
        # A check takes about 4 GiB.
        memory = var.gpus > 0 ? var.memory : 6144

        dynamic "device" {
          for_each = var.gpus > 0 ? [var.gpus] : []
          labels   = ["nvidia/gpu"]
          # Its default name, `device`, would hide Nomad's own ${device...} below.
          iterator = gpu
          content {
            count = gpu.value
          }
        }
      }
    }
  }
  group "rank-1" {
    dynamic "update" {
      for_each = var.gpus > 0 ? [1] : []
      content {
        # 20 min to pull the image, 1 x 15 to load, 5 to spare. Fetch the weights before.
        health_check      = "checks"
        min_healthy_time  = "30s"
        healthy_deadline  = "40m"
        progress_deadline = "45m"
        # The new server gets the GPUs of the old: there are none for a canary.
        max_parallel = 1
        auto_revert  = true
      }
    }

    restart {
      # Two more loads fit into the interval; then another machine is tried.
      attempts = var.gpus > 0 ? 2 : 0
      interval = "70m"
      delay    = "30s"
      mode     = "fail"
    }

    dynamic "reschedule" {
      # A check that fails is an answer: it is not tried elsewhere.
      for_each = var.gpus > 0 ? [] : [1]
      content {
        attempts  = 0
        unlimited = false
      }
    }

    network {
      port "link" {
        host_network = var.fabric
      }
    }

    volume "models" {
      type   = "host"
      source = var.models_volume
    }

    volume "cache" {
      type   = "host"
      source = var.cache_volume
    }

    task "vllm" {
      driver = "docker"
      # vLLM ends its requests; unpinning the host copy of the weights takes its time.
      kill_signal  = "SIGTERM"
      kill_timeout = "2m"

      config {
        image              = var.image
        args               = local.rank_1
        image_pull_timeout = "20m"
        # The server binds to one private address of the machine, and NCCL to its links.
        network_mode = "host"
        # Tensor-parallel workers talk through shared memory; docker's default is 64 MiB.
        shm_size     = 17179869184
        cap_drop     = ["all"]
        security_opt = ["no-new-privileges"]
        healthchecks {
          # Nomad's own check, below, is the one that counts.
          disable = true
        }
        # RoCE, which pins what it sends.
        devices = var.gpus > 0 ? [{ host_path = "/dev/infiniband", container_path = "/dev/infiniband" }] : []
        ulimit  = var.gpus > 0 ? [{ memlock = "-1" }] : []
      }

      env {
        # These differ by machine: its `meta` in the client's configuration.
        VLLM_HOST_IP       = "${NOMAD_IP_link}"
        NCCL_SOCKET_IFNAME = "${meta.fabric_interface}"
        GLOO_SOCKET_IFNAME = "${meta.fabric_interface}"
        NCCL_IB_HCA        = "${meta.fabric_hca}"
        # Written below; the Hugging Face client takes an empty file as no token.
        HF_TOKEN_PATH = "${NOMAD_SECRETS_DIR}/hf_token"
      }

      template {
        destination = "${NOMAD_TASK_DIR}/master"
        env         = true
        # Started before the first machine is known, it starts again.
        change_mode = "restart"
        data        = <<-EOT
          {{- range nomadService "deepseek-v4-flash-gb10-x2-master" -}}
          SM12X_MASTER_ADDR={{ .Address }}
          {{ end -}}
        EOT
      }

      template {
        destination = "${NOMAD_SECRETS_DIR}/hf_token"
        uid         = 1000
        gid         = 1000
        perms       = "0400"
        # A restart would cost a load; a new secret waits for the next one.
        change_mode = "noop"
        data        = <<-EOT
          {{- $path := printf "nomad/jobs/%s" (env "NOMAD_JOB_ID") -}}
          {{- if nomadVarExists $path }}{{ with nomadVar $path -}}
          {{ with .hf_token }}{{ . }}{{ end }}
          {{- end }}{{ end }}
        EOT
      }

      template {
        destination = "${NOMAD_SECRETS_DIR}/api_key"
        env         = true
        uid         = 1000
        gid         = 1000
        perms       = "0400"
        change_mode = "noop"
        data        = <<-EOT
          {{- $path := printf "nomad/jobs/%s" (env "NOMAD_JOB_ID") -}}
          {{- if nomadVarExists $path }}{{ with nomadVar $path -}}
          {{ with .api_key }}VLLM_API_KEY={{ . }}{{ end }}
          {{- end }}{{ end }}
        EOT
      }

      volume_mount {
        volume      = "cache"
        destination = "/cache"
      }

      volume_mount {
        volume      = "models"
        destination = "/cache/huggingface"
      }

      resources {
        cpu = var.gpus > 0 ? var.cpu : 1000
        # A check takes about 4 GiB.
        memory = var.gpus > 0 ? var.memory : 6144

        dynamic "device" {
          for_each = var.gpus > 0 ? [var.gpus] : []
          labels   = ["nvidia/gpu"]
          # Its default name, `device`, would hide Nomad's own ${device...} below.
          iterator = gpu
          content {
            count = gpu.value
          }
        }
      }
    }
  }
}
