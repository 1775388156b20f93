metadata description = 'The right to send approve commands. The principal is a parameter, so that the name of the assignment has it: an app that is made again has another principal, and gets another assignment.'

param namespaceName string
param queueName string

@description('Principal id of the managed identity.')
param principalId string

var dataSender = subscriptionResourceId('Microsoft.Authorization/roleDefinitions', '69a216fc-b8fb-44d8-bc22-1f3c2cd27a39')

resource bus 'Microsoft.ServiceBus/namespaces@2024-01-01' existing = {
  name: namespaceName
}

resource queue 'Microsoft.ServiceBus/namespaces/queues@2024-01-01' existing = {
  parent: bus
  name: queueName
}

resource sends 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  scope: queue
  name: guid(queue.id, principalId, dataSender)
  properties: {
    roleDefinitionId: dataSender
    principalId: principalId
    principalType: 'ServicePrincipal'
  }
}
