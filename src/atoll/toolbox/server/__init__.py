"""What servers do: mixing, clustering, similarity, distillation, prototypes, splitting."""
