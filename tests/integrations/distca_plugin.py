from hf_distca.integrations.swift import plan_attention

plan_attention(__name__, tokens_per_rank="1k")
